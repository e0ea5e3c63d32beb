// resources shows the resources in memory as a table that can be sorted and filtered.

import { byId, make, setText, sparkline, Table } from './dom.js';
import { bytes, count, percent, rate, resourceName } from './format.js';
import { readings } from './status.js';

let table;

/** open(name) is called with the name of a resource that the user selects. */
export function setUp(open) {
  const columns = [
    { title: 'Resource', value: resourceName, text: resourceName, action: (r) => open(resourceName(r)) },
    { title: 'Objects', number: true, value: (r) => r.objects, text: (r) => count(r.objects) },
    { title: 'Bytes', number: true, value: (r) => r.bytes, text: (r) => bytes(r.bytes) },
    { title: 'Watches', number: true, wide: true, value: (r) => r.watches, text: (r) => count(r.watches) },
    { title: 'Lag', number: true, value: (r) => r.lagEvents, text: (r) => count(r.lagEvents), tone: (r) => (r.lagEvents > 0 ? 'warn' : '') },
    { title: 'Events/s', number: true, wide: true, value: (r) => r.eventRate || 0, draw: drawEvents },
    { title: 'In the log', number: true, wide: true, value: (r) => r.logEvents, text: (r) => count(r.logEvents) },
    { title: 'Lists: memory', number: true, wide: true, value: (r) => r.lists.memory, text: (r) => count(r.lists.memory) },
    { title: 'past', number: true, wide: true, value: (r) => r.lists.past, text: (r) => count(r.lists.past) },
    { title: 'etcd', number: true, wide: true, value: (r) => r.lists.etcd, text: (r) => count(r.lists.etcd), tone: (r) => (r.lists.etcd > 0 ? 'warn' : '') },
    { title: 'hit', number: true, wide: true, value: hit, text: (r) => percent(r.lists.memory + r.lists.past, total(r)) },
    { title: 'State', wide: true, value: state, text: state, tone: (r) => (state(r) === 'ready' ? '' : 'bad') },
  ];
  table = new Table(byId('resources-table'), {
    columns, key: resourceName, caption: '', empty: 'No resource has this name.', sort: columns[2], descending: true,
  });
  byId('resources-filter').addEventListener('input', update);
  byId('resources-empty').addEventListener('change', update);
}

/** Shows the rate of events, and a line of the last minute. */
function drawEvents(cell, { recent, eventRate }) {
  if (!cell.firstChild) cell.append(make('span'), make('span'));
  sparkline(cell.firstChild, recent, 60, `events: at most ${rate(Math.max(0, ...recent))} a second in the last minute`);
  setText(cell.lastChild, ` ${rate(eventRate)}`);
}

/** Removes the rows. */
export const forget = () => table.update([]);

const total = ({ lists }) => lists.memory + lists.past + lists.etcd;
const hit = (r) => (total(r) > 0 ? (r.lists.memory + r.lists.past) / total(r) : -1);
const state = (r) => (!r.ready ? 'loading' : r.inconsistent ? 'inconsistent' : 'ready');

export function update() {
  const last = readings.at(-1);
  if (!last || byId('resources').hidden) return;
  const text = byId('resources-filter').value.trim().toLowerCase();
  const empty = byId('resources-empty').checked;
  const shown = last.status.resources.filter((r) => resourceName(r).includes(text) && (empty || r.objects > 0 || total(r) > 0));
  table.caption.textContent = `${count(shown.length)} of ${count(last.status.resources.length)} resources; select one to see its past`;
  table.update(shown);
}
