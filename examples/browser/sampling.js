// Probabilities from logits: the surprise of a byte, and the choice of the next one.

/** log Σ exp(logit), in double precision. */
function logSumExp(logits) {
  let greatest = -Infinity;
  for (const logit of logits) greatest = Math.max(greatest, logit);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - greatest);
  return greatest + Math.log(sum);
}

/** -log2 of the probability of a byte. Throws where the logits are not finite. */
export function surprise(logits, byte) {
  const bits = (logSumExp(logits) - logits[byte]) / Math.LN2;
  if (!Number.isFinite(bits)) throw new Error("The model's logits are not finite; export it again.");
  return Math.max(bits, 0);
}

/** A byte from softmax(logits / temperature); the likeliest one at temperature 0. */
export function chooseByte(logits, temperature, random) {
  let best = 0;
  for (let byte = 1; byte < logits.length; byte++) if (logits[byte] > logits[best]) best = byte;
  if (temperature === 0) return best;
  const weights = Array.from(logits, (logit) => Math.exp((logit - logits[best]) / temperature));
  let left = random() * weights.reduce((sum, weight) => sum + weight, 0);
  const byte = weights.findIndex((weight) => (left -= weight) < 0);
  return byte < 0 ? best : byte; // rounding may leave a remainder
}

/** A generator of numbers in [0, 1), the same for the same seed: a Weyl sequence through a mixing function of 32 bits. */
export function seededRandom(seed) {
  let weyl = seed >>> 0;
  return () => {
    weyl = (weyl + 0x9e3779b9) >>> 0;
    let mixed = Math.imul(weyl ^ (weyl >>> 16), 0x85ebca6b);
    mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
    return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
  };
}
