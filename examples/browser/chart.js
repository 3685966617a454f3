// Bits per byte along the text, as a line.

const POINTS = 160;
const TOP = 8; // bits per byte of uniform guessing

/** Draw the mean surprise of equal parts of the record into a polyline of a 100 × 100 viewBox. */
export function drawChart(line, record) {
  const points = [];
  const parts = Math.min(POINTS, Math.floor(record.length / 4));
  for (let part = 0; part < parts; part++) {
    const begin = Math.floor((part * record.length) / parts);
    const mean = record.mean(begin, Math.floor(((part + 1) * record.length) / parts));
    if (Number.isNaN(mean)) continue;
    const height = (100 * Math.min(mean, TOP)) / TOP;
    points.push(`${((100 * (part + 0.5)) / parts).toFixed(2)},${(100 - height).toFixed(2)}`);
  }
  line.setAttribute("points", points.join(" "));
}
