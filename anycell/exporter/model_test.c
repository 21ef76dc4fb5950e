/* Runs the model on random inputs, and compares with what Python computed. */
#include "model.h"
#include <math.h>
#include <stdio.h>

#define STEPS @steps@
@tables@

static float largest(const float *out) {
    float error = 0.0f;
    for (int i = 0; i < STEPS * MODEL_OUTPUTS; i++)
        error = fmaxf(error, fabsf(out[i] - expected[i]) / (1.0f + fabsf(expected[i])));
    return error;
}

int main(void) {
    static float state[MODEL_STATE_SIZE], out[STEPS * MODEL_OUTPUTS];
#blob     static unsigned weights[MODEL_WEIGHTS_SIZE / sizeof(unsigned)];
#blob     FILE *file = fopen("model.bin", "rb");
#blob     const size_t size = file ? fread(weights, 1, sizeof weights, file) : 0;
#blob     const int wrong = model_load(state, weights, size);
#blob     if (wrong) return 1 + wrong;
    model_reset(state);
#whole     static float memory[STEPS * MODEL_MEMORY + 1];
#whole     model_process(state, in, out, STEPS, memory);
#step     model_process(state, in, out, STEPS);
    float error = largest(out);
#step     model_reset(state);
#step     for (int t = 0; t < STEPS; t++)
#step         model_step(state, in + t * MODEL_INPUTS, out + t * MODEL_OUTPUTS);
#step     error = fmaxf(error, largest(out));
    printf("largest error: %g\n", error);
    return model_version() != MODEL_VERSION || !(error < @tolerance@f);
}
