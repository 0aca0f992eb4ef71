/** SQL conditions made from filters. Values are quoted as texts always: DuckDB casts them to the column's type. */

/** @typedef {import("./state.js").ColumnFilter} ColumnFilter */

/** @param {string} name */
export function quoteName(name) {
  return `"${name.replaceAll('"', '""')}"`;
}

/** @param {string} value */
export function quoteText(value) {
  return `'${value.replaceAll("'", "''")}'`;
}

/**
 * Condition on one column, or null where the filter asks for nothing.
 * @param {string} column
 * @param {ColumnFilter} filter
 */
export function columnCondition(column, { values, min, max, isList }) {
  const name = quoteName(column);
  const parts = [];
  const given = values.filter((value) => value !== null);
  const either = [];
  if (isList) either.push(...given.map((value) => `list_contains(${name}, ${quoteText(value)})`));
  else if (given.length) either.push(`${name} IN (${given.map(quoteText).join(", ")})`);
  if (values.includes(null)) either.push(`${name} IS NULL`);
  if (either.length) parts.push(either.length > 1 ? `(${either.join(" OR ")})` : either[0]);
  if (min !== "") parts.push(`${name} >= ${quoteText(min)}`);
  if (max !== "") parts.push(`${name} <= ${quoteText(max)}`);
  return parts.length ? parts.join(" AND ") : null;
}

/**
 * Condition of a folder and all below it.
 * @param {string} folder
 */
function folderCondition(folder) {
  return `(folder = ${quoteText(folder)} OR starts_with(folder, ${quoteText(`${folder}/`)}))`;
}

/**
 * Condition of all filters and the reader's own.
 * @param {{filters: Record<string, ColumnFilter>, where: string, folder: string, name: string}} state
 * @param {string} [except] column whose filter is left out
 * @returns {string|null} null where nothing is asked for
 */
export function compose({ filters, where, folder, name }, except) {
  const parts = Object.entries(filters)
    .filter(([column]) => column !== except)
    .map(([column, filter]) => columnCondition(column, filter))
    .filter((part) => part !== null);
  if (folder && except !== "folder") parts.push(folderCondition(folder));
  if (name.trim()) parts.push(`contains(lower(file_name), ${quoteText(name.trim().toLowerCase())})`);
  if (where.trim() && !parts.length) return where.trim();
  // The line break ends a comment, which would hide the parenthesis.
  if (where.trim()) parts.push(`(${where.trim()}\n)`);
  return parts.length ? parts.join(" AND ") : null;
}
