/* Rounds x to integers from -127 to 127; returns what 1 of them stands for. */
static inline float rounded(const float *x, int8_t *q, int in) {
    uint32_t most = 0;
    for (int i = 0; i < in; i++) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    const float largest = float_of(most), inverse = 127.0f / largest;
    for (int i = 0; i < in; i++)
        q[i] = (int8_t)bits_of(x[i] * inverse + 12582912.0f);
    return most < 0x7f800000u ? largest * (1.0f / 127.0f) : NAN;
}

/* to += scale * scales * (weight q), with the weight by columns, an even number of them. Two
   products of such integers fit in 16 bits. */
static inline void multiply_integers(
    const int8_t *weight, const float *scales, float scale, const int8_t *q, int32_t *restrict sum,
    float *restrict to, int in, int out
) {
    for (int j = 0; j < out; j++) sum[j] = 0;
    for (int i = 0; i < in; i += 2, weight += 2 * out) {
        const int16_t first = q[i], second = q[i + 1];
        for (int j = 0; j < out; j++)
            sum[j] += (int16_t)(first * weight[j] + second * weight[out + j]);
    }
    for (int j = 0; j < out; j++) to[j] += scale * scales[j] * (float)sum[j];
}
