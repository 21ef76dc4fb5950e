/* The model as a class of C++, each object a stream with its own state. */
#ifndef MODEL_HPP
#define MODEL_HPP

#include "model.h"
#include <cstddef>

namespace model {

class Stream {
public:
    static constexpr std::size_t inputs = MODEL_INPUTS, outputs = MODEL_OUTPUTS;

    Stream() { reset(); }
#blob     // What model_load returns. Nothing else may be called before.
#blob     int load(const void *weights, std::size_t size) { return model_load(state, weights, size); }
    void reset() { model_reset(state); }
#step     void step(const float *in, float *out) { model_step(state, in, out); }
#step     void process(const float *in, float *out, std::size_t steps) {
#step         model_process(state, in, out, steps);
#whole     void process(const float *in, float *out, std::size_t steps, float *memory) {
#whole         model_process(state, in, out, steps, memory);
    }

private:
    alignas(64) float state[MODEL_STATE_SIZE];
};

} // namespace model
#endif
