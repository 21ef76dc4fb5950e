/* Rounds x to integers from -127 to 127; returns what 1 of them stands for. */
static inline float rounded(const float *x, int16_t *q, int in) {
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

/* to += scale * scales * (weight q), with the weight by rows, four of them at a time. */
static inline void multiply_integers(
    const int8_t *weight, const float *scales, float scale, const int16_t *q, float *restrict to,
    int in, int out
) {
    for (int j = 0; j < out; j += 4, weight += 4 * in) {
        int32_t sum[4] = {0};
        for (int i = 0; i < in; i++)
            for (int k = 0; k < 4; k++) sum[k] += (int16_t)weight[k * in + i] * q[i];
        for (int k = 0; k < 4 && j + k < out; k++) to[j + k] += scale * scales[j + k] * (float)sum[k];
    }
}
