/* Written by anycell; see model.h. Where the compiler may reorder sums, functions are wrong. */
#if defined(__FAST_MATH__)
#error "compile this file without -ffast-math: append -fno-fast-math"
#endif

#if defined(__clang__) /* no model calls all of these functions */
#pragma clang diagnostic ignored "-Wunused-function"
#endif

#include "model.h"
#include <math.h>
#include <stdint.h>

/* Numbers below 1e-38 take a processor long, and a decaying state ends there: they become 0. */
#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#define FLUSH(run) do { \
        const unsigned mode = _mm_getcsr(); \
        _mm_setcsr(mode | 0x8040u); \
        run; \
        _mm_setcsr(mode); \
    } while (0)
#elif (defined(__aarch64__) || __ARM_FP) && defined(__GNUC__)
#if defined(__aarch64__)
#define GET "mrs %0, fpcr"
#define SET "msr fpcr, %0"
#else
#define GET "vmrs %0, fpscr"
#define SET "vmsr fpscr, %0"
#endif
#define FLUSH(run) do { \
        size_t mode; \
        __asm__ __volatile__(GET : "=r"(mode) : : "memory"); \
        __asm__ __volatile__(SET : : "r"(mode | 1u << 24) : "memory"); \
        run; \
        __asm__ __volatile__(SET : : "r"(mode) : "memory"); \
    } while (0)
#else
#define FLUSH(run) do { run; } while (0)
#endif

static inline float float_of(uint32_t x) {
    union { uint32_t of; float to; } both;
    both.of = x;
    return both.to;
}

static inline uint32_t bits_of(float x) {
    union { float of; uint32_t to; } both;
    both.of = x;
    return both.to;
}

#blob /* The weights, whose address a state begins with. */
#blob static inline const unsigned char *weights_of(const float *state) {
#blob     const unsigned char *weights;
#blob     for (size_t k = 0; k < sizeof weights; k++)
#blob         ((unsigned char *)&weights)[k] = ((const unsigned char *)state)[k];
#blob     return weights;
#blob }
#blob
@functions@
static inline float real(@number@ weight) { return @real@; }

/* to += weight x, with the weight by columns */
static inline void multiply(
    const @number@ *weight, const float *x, float *restrict to, int in, int out
) {
    int i = 0;
    for (; i + 4 <= in; i += 4, weight += 4 * out)
        for (int j = 0; j < out; j++)
            to[j] += (x[i] * real(weight[j]) + x[i + 1] * real(weight[out + j]))
                + (x[i + 2] * real(weight[2 * out + j]) + x[i + 3] * real(weight[3 * out + j]));
    for (; i < in; i++, weight += out)
        for (int j = 0; j < out; j++)
            to[j] += x[i] * real(weight[j]);
}

@steps@

#blob int model_load(float *state, const void *weights, size_t size) {
#blob     static const uint32_t header[5] = {@words@};
#blob     const uint32_t *words = weights;
#blob     uint32_t total = 2166136261u;
#blob     if ((uintptr_t)weights % 4) return MODEL_MISALIGNED;
#blob     if (size < 64) return MODEL_TRUNCATED;
#blob     if (words[0] != header[0]) return MODEL_NO_WEIGHTS;
#blob     if (words[1] != header[1]) return MODEL_OTHER_VERSION;
#blob     for (int k = 2; k < 5; k++)
#blob         if (words[k] != header[k]) return MODEL_OTHER_MODEL;
#blob     if (size < MODEL_WEIGHTS_SIZE) return MODEL_TRUNCATED;
#blob     for (int k = 6; k < MODEL_WEIGHTS_SIZE / 4; k++) {
#blob         total = (total ^ words[k]) * 16777619u;
#blob         total ^= total >> 15;
#blob     }
#blob     if (total != words[5]) return MODEL_DAMAGED;
#blob     for (size_t k = 0; k < sizeof weights; k++)
#blob         ((unsigned char *)state)[k] = ((const unsigned char *)&weights)[k];
#blob     return 0;
#blob }
#blob
int model_version(void) { return MODEL_VERSION; }

size_t model_state_size(void) { return MODEL_STATE_SIZE * sizeof(float); }

void model_reset(float *state) {
    (void)state;
@reset@
}

#step void model_step(float *state, const float *in, float *out) { FLUSH(step(state, in, out)); }
#step
static void run(@process@) {
#whole     (void)memory;
@runs@
}

void model_process(@process@) {
#step     FLUSH(run(state, in, out, steps));
#whole     FLUSH(run(state, in, out, steps, memory));
}
