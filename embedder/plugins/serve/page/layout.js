/** Justified rows: images of one height side by side that fill the width. */

export const GAP = 10;
const MIN_RATIO = 0.5;
const MAX_RATIO = 2.6;

/**
 * Places boxes. The place of a box depends on those before it and in its row, on none after, so that a page that
 * grows moves nothing above.
 * @param {number[]} ratios width by height of each
 * @param {number} width of the whole
 * @param {number} target height that a row has at most
 * @returns {{width: number, height: number, row: number}[]}
 */
export function justify(ratios, width, target) {
  const boxes = [];
  let row = [];
  let sum = 0;
  let number = 0;
  const close = (height) => {
    for (const ratio of row) boxes.push({ width: Math.floor(ratio * height * 100) / 100, height, row: number });
    row = [];
    sum = 0;
    number += 1;
  };
  for (const each of ratios) {
    const ratio = Math.min(MAX_RATIO, Math.max(MIN_RATIO, each || 1));
    row.push(ratio);
    sum += ratio;
    const height = (width - GAP * (row.length - 1)) / sum;
    if (height <= target) close(height);
  }
  if (row.length) close(Math.min(target, (width - GAP * (row.length - 1)) / sum));
  return boxes;
}

/**
 * Height of a row for a width: about five images on a wide screen, three on a telephone.
 * @param {number} width
 */
export function targetHeight(width) {
  return Math.max(104, Math.min(190, width / 3));
}
