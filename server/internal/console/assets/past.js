// past shows a resource as it was at a revision, and its changes between two revisions.

import { get } from './api.js';
import { fields } from './diff.js';
import { byId, make, Table } from './dom.js';
import { ago, count, resourceName } from './format.js';
import * as history from './history.js';
import { readings } from './status.js';

/** The changes whose fields are read at once; those of others are read when they are selected. */
const readAtOnce = 10;
/** A slider that moves sends requests when it has rested for this long. */
const rest = 150;

let kinds = null;
let kind = null;
let namespace = '';
let known = null; // the readable revisions
let request = new AbortController();
let dialog = new AbortController();
let timer = 0;

export function setUp() {
  byId('past-resource').addEventListener('change', (event) => {
    location.hash = `#/past/${event.target.value}`;
  });
  byId('past-namespace').addEventListener('change', (event) => {
    namespace = event.target.value;
    guarded(load);
  });
  byId('past-latest').addEventListener('click', () => guarded(load));
  byId('past-more').addEventListener('click', () => guarded(more));
  byId('object-close').addEventListener('click', () => byId('object').close());
  for (const side of ['from', 'to']) {
    const [slider, number] = inputs(side);
    slider.addEventListener('input', () => move(side, slider.valueAsNumber));
    number.addEventListener('change', () => move(side, Math.min(known.latest, Math.max(known.oldest, Math.round(number.valueAsNumber) || known.oldest))));
  }
}

const inputs = (side) => [byId(`past-${side}`), byId(`past-${side}-number`), byId(`past-${side}-time`)];

/** Shows a resource, by default one with objects. */
export function open(name) {
  guarded(async (signal) => {
    if (!kinds) {
      kinds = await history.discover(signal);
      await chooseNamespaces(signal);
    }
    const names = [...new Set(readings.at(-1)?.status.resources.map(resourceName) ?? kinds.keys())].filter((n) => kinds.has(n));
    const chosen = name || (kind ? resourceName(kind) : ['pods', 'configmaps'].find((n) => (readings.at(-1)?.status.resources ?? []).some((r) => resourceName(r) === n && r.objects > 0))) || names[0];
    if (!kinds.has(chosen)) throw new Error(`The server has no resource ${chosen} that can be listed.`);
    if (!names.includes(chosen)) names.push(chosen);
    byId('past-resource').replaceChildren(...names.sort().map((n) => make('option', { value: n, textContent: n, selected: n === chosen })));
    kind = kinds.get(chosen);
    byId('past-namespace').disabled = !kind.namespaced;
    await load(signal);
  });
}

async function chooseNamespaces(signal) {
  const limit = 500;
  const list = await get(`/api/v1/namespaces?limit=${limit}`, { accept: 'application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io', signal }).catch((error) => {
    if (error.status !== 403) throw error;
    return { items: [], metadata: {} };
  });
  const all = list.metadata.continue ? `(all; the first ${limit} are listed)` : '(all)';
  byId('past-namespace').replaceChildren(...['', ...(list.items ?? []).map((o) => o.metadata.name)].map((n) => make('option', { value: n, textContent: n || all })));
}

/** Runs an action in place of the one before, and shows its error. */
async function guarded(action) {
  clearTimeout(timer);
  request.abort();
  request = new AbortController();
  const { signal } = request;
  try {
    await action(signal);
  } catch (error) {
    if (signal.aborted) return;
    const message = error.status === 410 ? `${error.message} Read the newest revisions.` : error.message;
    byId('past-message').replaceChildren(make('span', { className: 'bad', textContent: message }));
  }
}

/** Cancels actions and the timer, and removes the data that they have read. */
export function forget() {
  request.abort();
  dialog.abort();
  clearTimeout(timer);
  kinds = kind = known = listed = null;
}

const message = (text) => byId('past-message').replaceChildren(text);

/** Reads the readable revisions, sets the sliders to the oldest and the newest, and shows both. */
async function load(signal) {
  message('Reading revisions …');
  for (const id of ['past-list', 'past-diff']) byId(id).replaceChildren();
  byId('past-more').hidden = true;
  for (const side of ['from', 'to']) for (const node of inputs(side).slice(0, 2)) node.disabled = true;
  known = await history.revisions(kind, kind.namespaced ? namespace : '', signal);
  const time = history.timeOf(known, known.oldest);
  byId('past-range').textContent = `Readable revisions: ${count(known.oldest)} (${time ? ago(time) : "before the server's start"}) to ${count(known.latest)}`;
  for (const [side, value] of [['from', known.oldest], ['to', known.latest]]) {
    const [slider, number] = inputs(side);
    for (const node of [slider, number]) Object.assign(node, { min: known.oldest, max: known.latest, disabled: false });
    set(side, value);
  }
  await show(signal);
}

function set(side, revision) {
  const [slider, number, output] = inputs(side);
  slider.value = number.value = revision;
  const time = history.timeOf(known, revision);
  const text = time ? `${time.toLocaleString('en-GB')}, ${ago(time)}` : "before the server's start";
  output.textContent = text;
  slider.setAttribute('aria-valuetext', `${revision}, ${text}`);
}

const revision = (side) => byId(`past-${side}`).valueAsNumber;

function move(side, value) {
  set(side, value);
  request.abort(); // the answers for the old position are not needed
  clearTimeout(timer);
  timer = setTimeout(() => guarded(show), rest);
}

let listed = null; // the pages of the list: {token, rows, revision, table}

async function show(signal) {
  message('Reading …');
  await Promise.all([showList(signal), showDifference(signal)]);
  message('');
}

const scope = () => (kind.namespaced ? namespace : '');

async function showList(signal) {
  const at = revision('from');
  const first = await history.page(kind, scope(), at, '', signal);
  byId('past-list-title').textContent = `${resourceName(kind)} as of revision ${count(at)}`;
  const several = kind.namespaced && !namespace;
  const nameColumn = { title: 'Name', value: (r) => r.object.metadata.name, text: (r) => r.object.metadata.name, action: (r) => showObject(r.object.metadata, at) };
  const columns = [nameColumn];
  if (several) columns.push({ title: 'Namespace', value: (r) => r.object.metadata.namespace, text: (r) => r.object.metadata.namespace });
  first.columnDefinitions.forEach((column, i) => {
    if (column.priority === 0 && column.name !== 'Name') {
      columns.push({ title: column.name, wide: columns.length > 2, number: column.type === 'integer', value: (r) => r.cells[i] ?? '', text: (r) => String(r.cells[i] ?? '') });
    }
  });
  const key = (r) => `${r.object.metadata.namespace ?? ''}/${r.object.metadata.name}`;
  listed = { at, rows: [], table: new Table(byId('past-list'), { columns, key, caption: '', empty: 'No objects at this revision.' }) };
  addPage(first);
}

function addPage(list) {
  listed.rows.push(...(list.rows ?? []));
  listed.token = list.metadata.continue ?? '';
  const left = list.metadata.remainingItemCount;
  listed.table.caption.textContent = `${count(listed.rows.length)} objects${listed.token ? `, ${left ? count(left) : 'some'} more in pages of ${history.pageSize}` : ''}`;
  listed.table.update(listed.rows);
  byId('past-more').hidden = !listed.token;
}

async function more(signal) {
  message('Reading …');
  addPage(await history.page(kind, scope(), listed.at, listed.token, signal));
  message('');
}

async function showObject({ namespace: ns = '', name }, at) {
  byId('object-title').textContent = `${resourceName(kind)} ${ns ? `${ns}/` : ''}${name} at revision ${count(at)}`;
  byId('object-text').textContent = 'Reading …';
  byId('object').showModal();
  dialog.abort();
  dialog = new AbortController();
  const { signal } = dialog;
  try {
    const found = await history.object(kind, ns, name, at, signal);
    if (found) delete found.metadata.managedFields;
    byId('object-text').textContent = found ? JSON.stringify(found, null, 2) : 'The object did not exist at this revision.';
  } catch (error) {
    if (!signal.aborted) byId('object-text').textContent = error.message;
  }
}

async function showDifference(signal) {
  const [from, to] = [revision('from'), revision('to')].sort((a, b) => a - b);
  const { changes, complete } = await history.changes(kind, scope(), from, to, signal);
  byId('past-diff-title').textContent = `Difference of revisions ${count(from)} and ${count(to)}`;
  const sums = ['added', 'removed', 'replaced', 'changed'].map((k) => [k, changes.filter((c) => c.kind === k).length]).filter(([, n]) => n > 0);
  const text = sums.length ? sums.map(([k, n]) => `${count(n)} ${k}`).join(', ') : 'No object differs';
  const bound = complete ? '' : `, of the first ${count(history.maxCompared)} objects of each revision; choose a namespace to compare others`;
  const shown = changes.slice(0, 200);
  const cut = shown.length < changes.length ? ` The first ${shown.length} are shown.` : '';
  const cards = shown.map((change) => card(change, from, to));
  byId('past-diff').replaceChildren(make('p', { className: 'muted', textContent: `${text}${bound}.${cut}` }), ...cards.map((c) => c.node));
  const fieldsOf = cards.filter((c, i) => shown[i].kind === 'changed').slice(0, readAtOnce);
  await Promise.all(fieldsOf.map((c) => c.read(signal)));
}

/** Returns the element of a change, and a function that reads its fields into it. */
function card({ kind: change, namespace: ns, name }, from, to) {
  const title = make('h4', {}, make('span', { className: `kind ${{ added: 'good', removed: 'bad' }[change] ?? 'warn'}`, textContent: change }));
  const body = make('div');
  const node = make('article', { className: 'change' }, title, body);
  const label = `${ns ? `${ns}/` : ''}${name}`;
  if (change !== 'changed') {
    title.append(make('button', { type: 'button', className: 'link', textContent: label, onclick: () => showObject({ namespace: ns, name }, change === 'removed' ? from : to) }));
    return { node };
  }
  const read = async (signal) => {
    const [before, after] = await Promise.all([from, to].map((at) => history.object(kind, ns, name, at, signal)));
    const rows = fields(before, after).map((f) => make('tr', {}, make('td', { textContent: f.field }),
      make('td', { className: 'before', textContent: value(f.before) }), make('td', { className: 'after', textContent: value(f.after) })));
    const head = make('tr', {}, ...['Field', 'Before', 'After'].map((t) => make('th', { scope: 'col', textContent: t })));
    body.replaceChildren(rows.length ? make('table', {}, make('thead', {}, head), make('tbody', {}, ...rows))
      : make('p', { className: 'muted', textContent: 'Only fields that are left out differ: metadata.managedFields.' }));
  };
  title.append(make('button', { type: 'button', className: 'link', textContent: label, onclick: () => guarded(read) }));
  return { node, read };
}

function value(v) {
  const text = v === undefined ? '–' : JSON.stringify(v);
  return text.length > 400 ? `${text.slice(0, 400)} …` : text;
}
