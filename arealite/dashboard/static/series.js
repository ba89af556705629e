// Arithmetic on series: smoothing, ranges, thinning. Pure functions; missing values are null.

/** Exponential moving average without the bias of its first value, as TensorBoard does it. `weight` is in [0, 1). */
export function smooth(values, weight) {
  if (!weight) return values;
  let last = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return last / norm;
  });
}

/** Return [low, high] of the finite values whose x is inside the range. */
export function extent(x, y, range, positive = false) {
  let low = Infinity;
  let high = -Infinity;
  for (let i = 0; i < y.length; i++) {
    const value = y[i];
    if (value === null || value === undefined || x[i] === null || (positive && value <= 0)) continue;
    if (range && (x[i] < range[0] || x[i] > range[1])) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/**
 * Return the positions of the values of `xs` in rising order; null if they rise already. Values that are null are left
 * out. The line of an evaluation has the step at which it began, so it may stand behind later steps.
 */
export function risingOrder(xs) {
  let last = -Infinity;
  if (xs.every((x) => x !== null && x >= last && ((last = x), true))) return null;
  return [...xs.keys()].filter((i) => xs[i] !== null).sort((a, b) => xs[a] - xs[b]);
}

/** Return the index of the value nearest to `x` that has a y, or -1. `xs` rises. */
export function nearest(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && Math.abs(xs[low - 1] - x) < Math.abs(xs[low] - x)) low -= 1;
  for (let d = 0; d < 50; d++) {
    if (ys[low - d] !== null && ys[low - d] !== undefined) return low - d;
    if (ys[low + d] !== null && ys[low + d] !== undefined) return low + d;
  }
  return -1;
}

/** Draw a line through points given in pixels; with more points than pixels, each column keeps its extremes. */
export function tracePath(ctx, xs, ys, toX, toY, width) {
  ctx.beginPath();
  let open = false;
  const dense = xs.length > width * 3;
  let column = null;
  let low = 0;
  let high = 0;
  let last = 0;
  const flush = () => {
    if (column === null) return;
    if (!open) ctx.moveTo(column, low);
    else ctx.lineTo(column, low);
    ctx.lineTo(column, high);
    ctx.lineTo(column, last);
    open = true;
    column = null;
  };
  for (let i = 0; i < xs.length; i++) {
    const py = ys[i] === null || ys[i] === undefined || xs[i] === null ? null : toY(ys[i]);
    // Many statistics have a value at some steps only: the line goes on to the next one.
    if (py === null) continue;
    const px = toX(xs[i]);
    if (!dense) {
      if (open) ctx.lineTo(px, py);
      else ctx.moveTo(px, py);
      open = true;
      continue;
    }
    const own = Math.round(px);
    if (own !== column) { flush(); column = own; low = high = py; }
    low = Math.min(low, py);
    high = Math.max(high, py);
    last = py;
  }
  if (dense) flush();
  ctx.stroke();
}
