// An exported step in the folder model/: fetched, compared with its checksums, and run by onnxruntime-web.

import { stateBytes, zeroState } from "./state_file.js";

const FOLDER = "model";
const FORMAT = "hf_recurrent.export.3";
const NUM_BYTES = 256;

export class Model {
  #ort;
  #session;

  constructor(ort, session, specification, endByte) {
    this.#ort = ort;
    this.#session = session;
    this.specification = specification;
    this.endByte = endByte; // ends a text; null where no byte does
    this.stateBytes = stateBytes(specification.state);
  }

  /** Tensors of typed arrays, one for every part of the state. */
  tensors(state) {
    const { Tensor } = this.#ort;
    const entries = this.specification.state.map(({ name, dtype, shape }) => [
      name,
      new Tensor(dtype, state[name], [1, ...shape]),
    ]);
    return Object.fromEntries(entries);
  }

  zeroState() {
    return this.tensors(zeroState(this.specification.state));
  }

  /** Read one byte: the logits of the next one and the new state. The given state is left as it was. */
  async step(byte, state) {
    const inputs = new this.#ort.Tensor("int64", BigInt64Array.of(BigInt(byte)), [1]);
    const outputs = await this.#session.run({ inputs, ...state });
    const names = this.specification.state.map((part) => part.name);
    return {
      logits: outputs.outputs.data,
      state: Object.fromEntries(names.map((name) => [name, outputs[`new.${name}`]])),
    };
  }
}

/** The model of the folder. Throws an Error with one sentence where it is missing, damaged or not for this page. */
export async function loadModel() {
  const ort = await loadRuntime();
  const manifest = parse(await fetchFile("manifest.json"), "manifest.json");
  const files = manifest?.files;
  if (manifest?.kind !== "exported_step" || files === null || typeof files !== "object") {
    throw new Error(`${FOLDER}/manifest.json does not belong to an exported step.`);
  }
  const checked = async (name) => {
    if (!Object.hasOwn(files, name)) throw new Error(`${FOLDER}/manifest.json does not list ${name}; export again.`);
    const content = await fetchFile(name);
    await checkFile(name, content, files[name]);
    return content;
  };
  const specification = parse(await checked("specification.json"), "specification.json");
  checkSpecification(specification);
  const program = await checked(specification.program);
  let endByte = null;
  if (Object.hasOwn(files, "tokenizer_config.json")) {
    const tokenizer = parse(await checked("tokenizer_config.json"), "tokenizer_config.json");
    endByte = tokenizer.eos_token === "\0" ? 0 : null;
  }
  const session = await openSession(ort, program, specification);
  return new Model(ort, session, specification, endByte);
}

async function loadRuntime() {
  let ort;
  try {
    ort = await import("./onnxruntime/ort.wasm.bundle.min.mjs");
  } catch {
    throw new Error(
      "onnxruntime-web is missing: run `python prepare.py CHECKPOINT` in this folder, then reload the page.",
    );
  }
  ort.env.wasm.numThreads = 1; // threads would need headers that a plain web server does not send
  ort.env.logLevel = "error";
  return ort;
}

async function fetchFile(name) {
  const path = `${FOLDER}/${name}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-cache" }); // files of two exports must not mix
  } catch {
    throw new Error(`${path} cannot be read; is the web server running?`);
  }
  if (response.status === 404 && name === "manifest.json") {
    throw new Error(
      `There is no model in ${FOLDER}/: run \`python prepare.py CHECKPOINT\` in this folder, then reload the page.`,
    );
  }
  if (!response.ok) throw new Error(`${path} is missing or cannot be read (status ${response.status}).`);
  return response.arrayBuffer();
}

async function checkFile(name, content, expected) {
  const path = `${FOLDER}/${name}`;
  if (content.byteLength !== expected?.size) {
    throw new Error(`${path} is damaged: it has ${content.byteLength} bytes instead of ${expected?.size}.`);
  }
  if (!globalThis.crypto?.subtle) return; // only pages of localhost or https can compute it
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  const found = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (found !== expected.sha256) throw new Error(`${path} is damaged: it differs from its checksum.`);
}

function parse(content, name) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content));
  } catch {
    throw new Error(`${FOLDER}/${name} is damaged: it is not JSON.`);
  }
}

function checkSpecification(specification) {
  if (specification?.format !== FORMAT) {
    throw new Error(
      `${FOLDER}/ has the format ${JSON.stringify(specification?.format)}; this page reads "${FORMAT}".`,
    );
  }
  if (specification.runtime !== "onnx") {
    throw new Error(`${FOLDER}/ was exported for ${specification.runtime}; export the model with --format onnx.`);
  }
  const { inputs, outputs, pooling, vocab_size, num_outputs } = specification;
  if (
    inputs !== "token_ids" ||
    outputs !== "logits" ||
    pooling !== null ||
    vocab_size !== NUM_BYTES ||
    num_outputs !== NUM_BYTES
  ) {
    throw new Error(`The model in ${FOLDER}/ is not a language model of bytes; this page needs one with 256 tokens.`);
  }
}

async function openSession(ort, program, specification) {
  let session;
  try {
    session = await ort.InferenceSession.create(program, { executionProviders: ["wasm"] });
  } catch (error) {
    const reason = String(error?.message ?? error)
      .split("\n")[0]
      .slice(0, 300);
    throw new Error(`${FOLDER}/${specification.program} cannot be loaded: ${reason}`);
  }
  const names = specification.state.map((part) => part.name);
  const fits =
    String(session.inputNames) === String(["inputs", ...names]) &&
    String(session.outputNames) === String(["outputs", ...names.map((name) => `new.${name}`)]);
  if (!fits) throw new Error(`${FOLDER}/${specification.program} does not match specification.json; export again.`);
  return session;
}
