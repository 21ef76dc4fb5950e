// Runs model.wasm: `const stream = await load(bytes)`, then `stream.process(x)` block by block.
#blob // With the contents of model.bin: `await load(bytes, weights)`.

export const INPUTS = @inputs@, OUTPUTS = @outputs@;
const STATE = @stack@, END = STATE + 4 * @state_size@; // addresses, after weights and stack
#blob const WEIGHTS = 64 * Math.ceil(END / 64), IN = WEIGHTS + @size@;
#embedded const IN = END;
const MEMORY = @memory@, PAGE = 65536;

#blob const WRONG = [
#blob   "misaligned", "truncated", "no weights", "of another version", "of another model", "damaged",
#blob ];
#blob
// Returns a stream, which has a memory of its own. bytes: the contents of model.wasm.
#embedded export async function load(bytes) {
#blob export async function load(bytes, weights) {
  const memory = new WebAssembly.Memory({ initial: Math.ceil(IN / PAGE) });
  const stack = new WebAssembly.Global({ value: "i32", mutable: true }, STATE);
  const product = (to, ...halves) => {
    const [low, high, by, byHigh] = halves.map((half) => BigInt.asUintN(64, half));
    const all = (high << 64n | low) * (byHigh << 64n | by), view = new DataView(memory.buffer);
    view.setBigUint64(to, BigInt.asUintN(64, all), true);
    view.setBigUint64(to + 8, BigInt.asUintN(64, all >> 64n), true);
  };
  const env = { __linear_memory: memory, __stack_pointer: stack, __multi3: product };
  const { instance } = await WebAssembly.instantiate(bytes, { env });
  const { reset, process } = instance.exports;
#blob   const given = new Uint8Array(weights).subarray(0, @size@);
#blob   new Uint8Array(memory.buffer, WEIGHTS).set(given);
#blob   const wrong = instance.exports.load(STATE, WEIGHTS, given.length);
#blob   if (wrong) throw new Error(`weights: ${WRONG[wrong - 1]}`);
  reset(STATE);
  return {
    // Begins a sequence.
    reset: () => reset(STATE),
    // Runs x.length / INPUTS steps, and returns a Float32Array of OUTPUTS numbers for each.
    process(x) {
      if (x.length % INPUTS) throw new Error(`x: given ${x.length} numbers, expected ${INPUTS} a step`);
      const steps = x.length / INPUTS, out = IN + 4 * x.length;
      const rows = out + 4 * steps * OUTPUTS;
      const missing = rows + 4 * steps * MEMORY - memory.buffer.byteLength;
      if (missing > 0) memory.grow(Math.ceil(missing / PAGE));
      new Float32Array(memory.buffer, IN, x.length).set(x);
      process(STATE, IN, out, steps, rows);
      return new Float32Array(memory.buffer, out, steps * OUTPUTS).slice();
    },
  };
}
