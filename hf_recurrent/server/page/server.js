// Requests to the server. The key is kept for this tab only.

const KEY = "hf-recurrent-key";

/** An error in the server's words; `status` is 0 if the server could not be reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // The browser keeps nothing: the key is asked for again after a reload.
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // As above.
  }
}

/** The response of a request whose body is an object, for JSON, or a File. */
export async function send(method, path, body, options = {}) {
  const isFile = body instanceof Blob;
  const headers = { "content-type": isFile ? "application/octet-stream" : "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const content = body === undefined || isFile ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: content, ...options });
  } catch {
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new ServerError(response.status, found?.error?.message ?? `The server answered ${response.status}.`);
  }
  return response;
}

/** The JSON of a response. */
export async function call(method, path, body) {
  return (await send(method, path, body)).json();
}

/** The objects of a stream of server-sent events. */
export async function* stream(path, body) {
  const response = await send("POST", path, body);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new ServerError(0, "The connection to the server was lost.");
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ServerError(500, found.error.message);
      yield found;
    }
  }
}
