// status polls the state of the server, at most once a second, and only while the page is visible.

import { get } from './api.js';

const interval = 1000;
const kept = 300; // readings: five minutes
const recent = 60; // rates of each resource: a minute

/** The last readings, the newest last. Each has the rates since the one before, NaN for the first. */
export const readings = [];

const listeners = [];

/** Calls f with each reading, and with each error of a request. */
export function onStatus(f) {
  listeners.push(f);
}

let timer = 0;
let running = false;
let request = new AbortController();

export function start() {
  running = true;
  document.addEventListener('visibilitychange', schedule);
  poll();
}

export function stop() {
  running = false;
  request.abort();
  clearTimeout(timer);
}

/** Stops, and removes the readings. */
export function forget() {
  stop();
  readings.length = 0;
}

function schedule() {
  clearTimeout(timer);
  if (running && document.visibilityState === 'visible') timer = setTimeout(poll, interval);
}

async function poll() {
  request.abort();
  request = new AbortController();
  const { signal } = request;
  let error = null;
  try {
    const status = await get('/debug/strata/status', { signal });
    if (!signal.aborted) add(status);
  } catch (e) {
    error = e;
  }
  if (signal.aborted) return;
  for (const f of listeners) f(readings.at(-1), error);
  if (error?.status === 401 || error?.status === 403) stop(); // another attempt has the same answer
  else schedule();
}

function add(status) {
  const before = readings.at(-1);
  const now = new Date(status.now) / 1000;
  const sum = (f) => status.clusters.reduce((n, c) => n + f(c), 0);
  const reading = {
    status,
    now,
    events: sum((c) => c.events),
    revisionLag: sum((c) => Math.max(0, c.etcdRevision - c.revision)),
    watchLag: Math.max(0, ...status.resources.map((r) => r.lagEvents)),
    resources: new Map(status.resources.map((r) => [`${r.resource}.${r.group}`, r])),
  };
  // A counter that decreases is that of a server that was restarted.
  const rate = (value, earlier) => (before && now > before.now && value >= earlier ? (value - earlier) / (now - before.now) : NaN);
  reading.rates = {
    events: rate(reading.events, before?.events),
    memory: rate(status.reads.memory, before?.status.reads.memory),
    past: rate(status.reads.past, before?.status.reads.past),
    etcd: rate(status.reads.etcd, before?.status.reads.etcd),
  };
  for (const [name, r] of reading.resources) {
    const last = before?.resources.get(name);
    r.eventRate = rate(r.events, last?.events ?? NaN);
    r.recent = last?.recent ?? []; // one list for all readings
    if (r.eventRate >= 0) r.recent.push(r.eventRate);
    if (r.recent.length > recent) r.recent.shift();
  }
  if (before) before.resources = new Map(); // rates need the last reading only
  readings.push(reading);
  if (readings.length > kept) readings.shift();
}
