/* Written by anycell @anycell@. Arrays are float, one sample after the other. */
#ifndef MODEL_H
#define MODEL_H

#include <stddef.h>

#define MODEL_VERSION @version@ /* of these functions */
#define MODEL_INPUTS @inputs@
#define MODEL_OUTPUTS @outputs@
#define MODEL_STATE_SIZE @state_size@

#ifdef __cplusplus
extern "C" {
#endif

/* MODEL_VERSION of the library, to compare with this header's. */
int model_version(void);

/* Bytes of a state, which has MODEL_STATE_SIZE numbers. */
size_t model_state_size(void);

/* Begins a sequence. */
void model_reset(float *state);

/* Runs one step, from MODEL_INPUTS to MODEL_OUTPUTS numbers; the arrays must not overlap. */
void model_step(float *state, const float *in, float *out);

/* Runs many steps. */
void model_process(float *state, const float *in, float *out, size_t steps);

#ifdef __cplusplus
}
#endif
#endif
