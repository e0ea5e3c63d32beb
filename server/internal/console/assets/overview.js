// overview shows the newest reading as numbers, and the last five minutes as plots.

import uPlot from './uplot/uPlot.esm.js';
import { byId, make, setText } from './dom.js';
import { bytes, count, percent, rate } from './format.js';
import { readings } from './status.js';

const tiles = [
  ['Revision', (r) => count(Math.max(0, ...r.status.clusters.map((c) => c.revision))), (r) => (r.revisionLag ? `${count(r.revisionLag)} behind etcd` : 'equal to etcd')],
  ['Objects', (r) => count(sum(r, (x) => x.objects)), (r) => `${r.status.resources.filter((x) => x.objects > 0).length} resources`],
  ['Bytes, as stored', (r) => bytes(sum(r, (x) => x.bytes)), (r) => `history ${bytes(r.status.clusters.reduce((n, c) => n + c.historyBytes, 0))} of ${bytes(r.status.clusters.reduce((n, c) => n + c.historyLimitBytes, 0))}`],
  ['Memory', (r) => bytes(r.status.memory.usedBytes), (r) => (r.status.memory.limitBytes ? `limit ${bytes(r.status.memory.limitBytes)}` : `heap ${bytes(r.status.memory.heapBytes)}`)],
  ['Watches', (r) => count(r.status.watches), (r) => (r.status.slow ? `${count(r.status.slow)} slow` : 'none is slow')],
  ['Reads from memory', (r) => hits(r.status.reads), ({ status: { reads } }) => `${count(reads.memory)} present, ${count(reads.past)} past, ${count(reads.etcd)} etcd`],
  ['Reads per second', ({ rates }) => rate(rates.memory + rates.past + rates.etcd), () => 'GET and LIST'],
  ['Events per second', ({ rates }) => rate(rates.events), (r) => `${count(r.events)} since the start`],
];

const sum = (r, f) => r.status.resources.reduce((n, x) => n + f(x), 0);
const hits = ({ memory, past, etcd }) => percent(memory + past, memory + past + etcd);

const plots = [
  { title: 'Reads per second, by source', format: rate, series: [['memory', (r) => r.rates.memory], ['past', (r) => r.rates.past], ['etcd', (r) => r.rates.etcd]] },
  { title: 'Events per second', format: rate, series: [['from etcd', (r) => r.rates.events]] },
  { title: 'Lag', format: count, series: [['slowest watch, events', (r) => r.watchLag], ['memory behind etcd, revisions', (r) => r.revisionLag]] },
  { title: 'Memory', format: bytes, binary: true, series: [['used', (r) => r.status.memory.usedBytes], ['heap', (r) => r.status.memory.heapBytes], ['history', (r) => r.status.clusters.reduce((n, c) => n + c.historyBytes, 0)]] },
];

const height = 150;
const dark = matchMedia('(prefers-color-scheme: dark)');
let drawn = []; // {plot, chart, figure, place}

export function setUp() {
  byId('tiles').replaceChildren(...tiles.map(([title]) => make('div', {}, make('dt', { textContent: title }), make('dd', {}, make('span'), make('small')))));
  drawn = plots.map((plot) => {
    const place = make('div', { role: 'img' });
    const figure = make('figure', {}, make('figcaption', { textContent: plot.title }), place);
    return { plot, figure, place };
  });
  byId('plots').replaceChildren(...drawn.map((d) => d.figure));
  new ResizeObserver(() => {
    for (const d of drawn) d.chart?.setSize({ width: d.place.clientWidth, height });
  }).observe(byId('plots'));
  dark.addEventListener('change', () => {
    forget();
    update();
  });
}

/** Removes the plots, which have the readings. update draws them again. */
export function forget() {
  for (const d of drawn) {
    d.chart?.destroy();
    d.chart = null;
  }
}

export function update() {
  const last = readings.at(-1);
  if (!last || byId('overview').hidden) return;
  tiles.forEach(([, value, note], i) => {
    const [number, small] = byId('tiles').children[i].querySelectorAll('span, small');
    setText(number, value(last));
    setText(small, note(last));
  });
  for (const d of drawn) {
    d.chart ??= draw(d);
    d.chart.setData(dataOf(d.plot));
    d.place.setAttribute('aria-label', `${d.plot.title}: ${d.plot.series.map(([name, f]) => `${name} ${text(d.plot, f(last))}`).join(', ')}`);
  }
}

const text = (plot, v) => (v == null || !Number.isFinite(v) ? '–' : plot.format(v));

/** uPlot takes a list of times and one of values for each series; null is a gap. */
const dataOf = (plot) => [readings.map((r) => r.now), ...plot.series.map(([, f]) => readings.map((r) => {
  const v = f(r);
  return Number.isFinite(v) ? v : null;
}))];

function draw({ plot, place }) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: color('--muted'), grid: { stroke: color('--line'), width: 1 }, ticks: { stroke: color('--line'), width: 1 }, font: '11px system-ui, sans-serif' };
  const last = (f) => text(plot, readings.length ? f(readings.at(-1)) : NaN);
  return new uPlot({
    width: place.clientWidth,
    height,
    cursor: { sync: { key: 'overview' }, drag: { x: false, y: false } },
    legend: { live: true },
    scales: { y: { range: (u, min, max) => [0, Math.max(max ?? 0, 1) * 1.1] } },
    axes: [
      { ...axis, size: 32, space: 70, values: (u, splits) => splits.map((s) => new Date(s * 1000).toLocaleTimeString('en-GB')) },
      { ...axis, size: 62, space: 28, incrs: plot.binary ? Array.from({ length: 45 }, (_, i) => 2 ** i) : undefined, values: (u, splits) => splits.map((v) => plot.format(v)) },
    ],
    series: [
      { label: 'time', value: (u, v) => new Date((v ?? readings.at(-1)?.now ?? 0) * 1000).toLocaleTimeString('en-GB') },
      ...plot.series.map(([label, f], i) => ({
        label, stroke: color(`--series-${i + 1}`), width: 2, dash: [[], [6, 3], [2, 2]][i], points: { show: (u) => u.data[0].length < 3 },
        value: (u, v) => (v == null ? last(f) : text(plot, v)),
      })),
    ],
  }, dataOf(plot), place);
}
