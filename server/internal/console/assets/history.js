// history reads past states: the readable revisions of a resource, its objects at one of them, and the changes between two.

import { Failure, get } from './api.js';
import { resourceName } from './format.js';

const table = 'application/json;as=Table;v=v1;g=meta.k8s.io';
const metadata = 'application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io';
const times = 'application/json;as=RevisionTimes;v=v1alpha1;g=stratakube.io';
const groups = 'application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList';

/** Objects of a page of the list, and of a page of metadata to compare. */
export const pageSize = 100;
const comparedPage = 500;
/** The difference compares at most this many objects of each revision. */
export const maxCompared = 5000;

/** Returns the resources that can be listed, by name: {group, version, resource, kind, namespaced}. The preferred version is the first. */
export async function discover(signal) {
  const all = new Map();
  for (const root of await Promise.all(['/api', '/apis'].map((path) => get(path, { accept: groups, signal })))) {
    for (const group of root.items) {
      for (const version of group.versions) {
        for (const r of version.resources ?? []) {
          const kind = { group: group.metadata.name ?? '', version: version.version, resource: r.resource, kind: r.responseKind?.kind, namespaced: r.scope === 'Namespaced' };
          if (r.verbs.includes('list') && !all.has(resourceName(kind))) all.set(resourceName(kind), kind);
        }
      }
    }
  }
  return all;
}

function listPath(kind, namespace) {
  const root = kind.group ? `/apis/${kind.group}/${kind.version}` : `/api/${kind.version}`;
  return `${root}${namespace ? `/namespaces/${encodeURIComponent(namespace)}` : ''}/${kind.resource}`;
}

/** Returns {oldest, latest, times: [{revision, time}]} with numbers and Dates. */
export async function revisions(kind, namespace, signal) {
  let answer;
  try {
    answer = await get(listPath(kind, namespace), { accept: times, signal });
  } catch (error) {
    if (error.status === 406) throw new Failure(406, `${resourceName(kind)} has no past here: it is not cached, or another server serves it.`);
    throw error;
  }
  return {
    oldest: Number(answer.oldest),
    latest: Number(answer.latest),
    times: answer.times.map((t) => ({ revision: Number(t.revision), time: new Date(t.time) })),
  };
}

/** Returns the time at which a revision was current, at most a second too late, or null if the server does not know it. */
export function timeOf({ times: all }, revision) {
  if (all.length === 0 || revision < all[0].revision) return null;
  let [low, high] = [0, all.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle].revision >= revision) high = middle;
    else low = middle + 1;
  }
  return all[low].revision >= revision ? all[low].time : null;
}

const at = (revision, { limit, token, fieldSelector } = {}) => {
  const query = new URLSearchParams(token ? { continue: token } : { resourceVersion: revision, resourceVersionMatch: 'Exact' });
  if (limit) query.set('limit', limit);
  if (fieldSelector) query.set('fieldSelector', fieldSelector);
  return `?${query}`;
};

/** Returns a page of the table of a list at a revision; token is that of the page before. */
export const page = (kind, namespace, revision, token, signal) => get(`${listPath(kind, namespace)}${at(revision, { limit: pageSize, token })}`, { accept: table, signal });

/** Returns an object at a revision, or undefined if it did not exist. */
export async function object(kind, namespace, name, revision, signal) {
  const list = await get(`${listPath(kind, namespace)}${at(revision, { fieldSelector: `metadata.name=${name}` })}`, { signal });
  const [found] = list.items ?? [];
  return found && { apiVersion: list.apiVersion, kind: kind.kind, ...found };
}

/** Returns the versions of the first objects at a revision, by namespace and name, and whether these are all. */
async function versions(kind, namespace, revision, signal) {
  const all = new Map();
  let token = '';
  do {
    const list = await get(`${listPath(kind, namespace)}${at(revision, { limit: comparedPage, token })}`, { accept: metadata, signal });
    for (const { metadata: m } of list.items ?? []) all.set(`${m.namespace ?? ''}/${m.name}`, { namespace: m.namespace ?? '', name: m.name, uid: m.uid, version: m.resourceVersion });
    token = list.metadata.continue ?? '';
  } while (token && all.size < maxCompared);
  return { all, complete: token === '', last: [...all.keys()].at(-1) ?? '' };
}

/** Returns {changes: [{kind, namespace, name}], complete}. Lists are in the order of keys, so both sides are cut at the same object. */
export async function changes(kind, namespace, from, to, signal) {
  const [before, after] = await Promise.all([from, to].map((revision) => versions(kind, namespace, revision, signal)));
  const ends = [before, after].filter((side) => !side.complete).map((side) => side.last.split('/'));
  const beyond = ({ namespace: ns, name }) => ends.some(([n, last]) => order(ns, n) > 0 || (ns === n && order(name, last) > 0));
  const found = [];
  for (const [key, o] of before.all) {
    const now = after.all.get(key);
    if (beyond(o)) continue;
    if (!now) found.push({ kind: 'removed', ...o });
    else if (now.uid !== o.uid) found.push({ kind: 'replaced', ...o });
    else if (now.version !== o.version) found.push({ kind: 'changed', ...o });
  }
  for (const [key, o] of after.all) {
    if (!before.all.has(key) && !beyond(o)) found.push({ kind: 'added', ...o });
  }
  found.sort((a, b) => order(a.namespace, b.namespace) || order(a.name, b.name));
  return { changes: found, complete: ends.length === 0 };
}

const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
