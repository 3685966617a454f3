// State files: safetensors with the hash of the weights that a state belongs to.
//
// `state` maps names to typed arrays; `pending` is the last byte, which the state has not read yet, or null where a text
// begins. Files of `ExportedStep.save_state` have no pending byte.

const TYPES = {
  float32: { code: "F32", array: Float32Array },
  float64: { code: "F64", array: Float64Array },
};
const LONGEST_HEADER = 1 << 20;

const sizeOf = (part) => part.shape.reduce((product, size) => product * size, 1);

/** Typed arrays of zeros: the state where a text begins. */
export function zeroState(parts) {
  return Object.fromEntries(parts.map((part) => [part.name, new TYPES[part.dtype].array(sizeOf(part))]));
}

/** Bytes that a state takes in memory. */
export function stateBytes(parts) {
  return parts.reduce((sum, part) => sum + sizeOf(part) * TYPES[part.dtype].array.BYTES_PER_ELEMENT, 0);
}

/** The bytes of a state file. */
export function encodeState(state, pending, specification) {
  const header = { __metadata__: { weights_hash: specification.weights_hash, pending: JSON.stringify([pending]) } };
  let offset = 0;
  for (const part of specification.state) {
    const end = offset + state[part.name].byteLength;
    header[part.name] = { dtype: TYPES[part.dtype].code, shape: [1, ...part.shape], data_offsets: [offset, end] };
    offset = end;
  }
  let json = JSON.stringify(header);
  json = new TextEncoder().encode(json + " ".repeat((8 - (new TextEncoder().encode(json).length % 8)) % 8));
  const file = new Uint8Array(8 + json.length + offset);
  new DataView(file.buffer).setBigUint64(0, BigInt(json.length), true);
  file.set(json, 8);
  offset = 8 + json.length;
  for (const part of specification.state) {
    const { buffer, byteOffset, byteLength } = state[part.name];
    file.set(new Uint8Array(buffer, byteOffset, byteLength), offset);
    offset += byteLength;
  }
  return file;
}

/** The state and the pending byte of a file. Throws an Error with one sentence unless the file fits the model. */
export function decodeState(file, specification) {
  const { header, data } = splitFile(file);
  const { __metadata__: metadata = {}, ...tensors } = header;
  if (metadata?.weights_hash === undefined) {
    throw new Error("The file names no weights: it was not saved by this page or by an exported step.");
  }
  if (metadata.weights_hash !== specification.weights_hash) {
    throw new Error("The state was saved with other weights; a state works only with the weights that made it.");
  }
  const names = specification.state.map((part) => part.name);
  const unknown = Object.keys(tensors).find((name) => !names.includes(name));
  if (unknown !== undefined) throw damaged(`it has the unknown part ${JSON.stringify(unknown.slice(0, 60))}`);
  const state = Object.fromEntries(
    specification.state.map((part) => [part.name, decodePart(part, tensors[part.name], data)]),
  );
  return { state, pending: decodePending(metadata.pending) };
}

const damaged = (reason) => new Error(`The file is damaged or not a state file: ${reason}.`);

function splitFile(file) {
  if (file.byteLength < 8) throw damaged("it is shorter than 8 bytes");
  const length = new DataView(file).getBigUint64(0, true);
  if (length > LONGEST_HEADER || Number(length) > file.byteLength - 8) throw damaged("its header does not fit");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(file, 8, Number(length))));
  } catch {
    throw damaged("its header is not JSON");
  }
  if (header === null || typeof header !== "object" || Array.isArray(header))
    throw damaged("its header is not an object");
  return { header, data: file.slice(8 + Number(length)) };
}

function decodePart(part, entry, data) {
  const { code, array } = TYPES[part.dtype];
  const name = JSON.stringify(part.name);
  const shape = [1, ...part.shape];
  if (entry === null || typeof entry !== "object") throw damaged(`it has no part ${name}`);
  if (entry.dtype !== code || JSON.stringify(entry.shape) !== JSON.stringify(shape)) {
    throw damaged(`${name} is not of type ${code} and shape (${shape.join(", ")})`);
  }
  const [begin, end] = Array.isArray(entry.data_offsets) ? entry.data_offsets : [];
  const bytes = sizeOf(part) * array.BYTES_PER_ELEMENT;
  if (!Number.isInteger(begin) || begin < 0 || end - begin !== bytes || end > data.byteLength) {
    throw damaged(`the values of ${name} lie outside the file`);
  }
  const values = new array(data.slice(begin, end));
  if (!values.every(Number.isFinite)) throw damaged(`${name} has NaN or infinite values`);
  return values;
}

function decodePending(text) {
  if (text === undefined) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw damaged("its pending byte is not JSON");
  }
  const [byte] = Array.isArray(value) && value.length === 1 ? value : [undefined];
  if (byte !== null && !(Number.isInteger(byte) && byte >= 0 && byte < 256))
    throw damaged("its pending byte is not a byte");
  return byte;
}
