// Runs model.wasm: `const stream = await load(bytes)`, then `stream.process(x)` block by block.

export const INPUTS = @inputs@, OUTPUTS = @outputs@;
const STATE = @stack@, IN = STATE + 4 * @state_size@; // addresses, after weights and stack
const MEMORY = @memory@, PAGE = 65536;

// Returns a stream, which has a memory of its own. bytes: the contents of model.wasm.
export async function load(bytes) {
  const memory = new WebAssembly.Memory({ initial: Math.ceil(IN / PAGE) });
  const stack = new WebAssembly.Global({ value: "i32", mutable: true }, STATE);
  const product = (to, ...halves) => {
    const [low, high, by, byHigh] = halves.map((half) => BigInt.asUintN(64, half));
    const all = (high << 64n | low) * (byHigh << 64n | by), view = new DataView(memory.buffer);
    view.setBigUint64(to, BigInt.asUintN(64, all), true);
    view.setBigUint64(to + 8, BigInt.asUintN(64, all >> 64n), true);
  };
  const env = { __linear_memory: memory, __stack_pointer: stack, __multi3: product };
  const { reset, process } = (await WebAssembly.instantiate(bytes, { env })).instance.exports;
  reset(STATE);
  return {
    // Begins a sequence.
    reset: () => reset(STATE),
    // Runs x.length / INPUTS steps, and returns a Float32Array of OUTPUTS numbers for each.
    process(x) {
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
