/**
 * Folders as a tree, made of the paths that items lie in; only arithmetic.
 *
 * @typedef {{name: string, path: string, count: number, folders: Folder[]}} Folder count of all rows in it and below
 */

/**
 * Makes the tree. Folders that hold nothing but one other are named with it, as `2024/07 Norway`.
 * @param {{value: string, count: number}[]} values paths with the rows that lie in each itself
 * @returns {Folder}
 */
export function tree(values) {
  /** @type {Folder} */
  const root = { name: "", path: "", count: 0, folders: [] };
  for (const { value, count } of values) {
    let folder = root;
    folder.count += count;
    for (const name of value ? value.split("/") : []) {
      const path = folder.path ? `${folder.path}/${name}` : name;
      let next = folder.folders.find((each) => each.path === path);
      if (!next) folder.folders.push((next = { name, path, count: 0, folders: [] }));
      next.count += count;
      folder = next;
    }
  }
  joinOnly(root);
  return root;
}

/** @param {Folder} folder */
function joinOnly(folder) {
  folder.folders = folder.folders.map((each) => {
    let joined = each;
    while (joined.folders.length === 1 && joined.folders[0].count === joined.count) {
      const [only] = joined.folders;
      joined = { ...only, name: `${joined.name}/${only.name}` };
    }
    joinOnly(joined);
    return joined;
  });
  folder.folders.sort((one, other) => one.name.localeCompare(other.name, undefined, { numeric: true }));
}

/**
 * Folders in a folder.
 * @param {Folder} root
 * @param {string} path
 * @returns {Folder[]}
 */
export function children(root, path) {
  if (root.path === path) return root.folders;
  const next = root.folders.find((each) => path === each.path || path.startsWith(`${each.path}/`));
  return next ? children(next, path) : [];
}
