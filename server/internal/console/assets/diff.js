// diff compares two states of an object, field by field. Elements of lists are matched by a key that all of them have.

const ignored = new Set(['metadata.managedFields', 'metadata.resourceVersion']);
const keys = ['name', 'type', 'key', 'uid', 'ip', 'containerPort', 'port'];

/** Returns the fields that differ, as {field, before, after}; undefined is an absent value. */
export function fields(before, after) {
  const all = [];
  walk(before, after, '', all);
  return all;
}

function walk(a, b, path, all) {
  if (ignored.has(path) || same(a, b)) return;
  if (isObject(a) && isObject(b)) {
    for (const name of [...new Set([...Object.keys(a), ...Object.keys(b)])].sort()) {
      walk(a[name], b[name], join(path, name), all);
    }
    return;
  }
  const key = Array.isArray(a) && Array.isArray(b) && keys.find((name) => identifies(name, a) && identifies(name, b));
  if (key) {
    const elements = (list) => new Map(list.map((element) => [element[key], element]));
    const [from, to] = [elements(a), elements(b)];
    for (const value of new Set([...from.keys(), ...to.keys()])) walk(from.get(value), to.get(value), `${path}[${key}=${value}]`, all);
    return;
  }
  all.push({ field: path, before: a, after: b });
}

const isObject = (v) => v !== null && typeof v === 'object' && !Array.isArray(v);

const identifies = (name, list) => list.every((e) => isObject(e) && e[name] !== undefined) && new Set(list.map((e) => e[name])).size === list.length;

const join = (path, name) => (/^[A-Za-z0-9_]+$/.test(name) ? (path ? `${path}.${name}` : name) : `${path}[${name}]`);

const same = (a, b) => a === b || (typeof a === 'object' && typeof b === 'object' && JSON.stringify(sorted(a)) === JSON.stringify(sorted(b)));

function sorted(v) {
  if (Array.isArray(v)) return v.map(sorted);
  if (!isObject(v)) return v;
  return Object.fromEntries(Object.keys(v).sort().map((name) => [name, sorted(v[name])]));
}
