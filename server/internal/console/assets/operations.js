// operations shows slow watches, consistency checks and API servers.

import { get } from './api.js';
import { byId, Table } from './dom.js';
import { ago, bytes, count, resourceName, seconds, time } from './format.js';
import { readings } from './status.js';

const slow = [
  { title: 'Resource', value: resourceName, text: resourceName },
  { title: 'User', value: (w) => w.user ?? '', text: (w) => w.user ?? '–' },
  { title: 'Namespace', wide: true, value: (w) => w.namespace ?? '', text: (w) => w.namespace || '(all)' },
  { title: 'Behind', number: true, value: (w) => w.behindSeconds, text: (w) => (w.expired ? 'expired' : w.behindSeconds > 0 ? seconds(w.behindSeconds) : 'unknown'), tone: () => 'warn' },
  { title: 'Revisions', number: true, value: (w) => w.behindRevisions, text: (w) => count(w.behindRevisions) },
  { title: 'Position', number: true, wide: true, value: (w) => w.revision, text: (w) => count(w.revision) },
  { title: 'Since', wide: true, value: (w) => w.since ?? '', text: (w) => (w.since ? time(w.since) : '–') },
];

const checks = [
  { title: 'Resource', value: resourceName, text: resourceName },
  { title: 'Result', value: (c) => c.status, text: (c) => (c.status === 'failure' ? `${c.differences} differences${c.repaired ? ', repaired' : ''}` : c.status === 'error' ? c.error : 'equal'), tone: (c) => ({ success: 'good', failure: 'bad' }[c.status] ?? 'warn') },
  { title: 'Objects', number: true, value: (c) => c.keys, text: (c) => count(c.keys) },
  { title: 'Last', value: (c) => c.time, text: (c) => ago(c.time) },
  { title: 'Revision', number: true, wide: true, value: (c) => c.revision, text: (c) => count(c.revision ?? 0) },
  { title: 'Duration', number: true, wide: true, value: (c) => c.seconds, text: (c) => seconds(c.seconds) },
  { title: 'Hash', wide: true, text: (c) => c.hash ?? '–' },
];

const servers = [
  { title: 'Host', value: (l) => l.host, text: (l) => l.host },
  { title: 'Renewed', value: (l) => l.renewed ?? '', text: (l) => (l.renewed ? ago(l.renewed) : '–'), tone: (l) => (alive(l) ? 'good' : 'bad') },
  { title: 'Holder', wide: true, value: (l) => l.holder, text: (l) => l.holder },
  { title: 'Lease', wide: true, value: (l) => l.name, text: (l) => l.name },
];

const clusters = [
  { title: 'Endpoints', text: (c) => c.endpoints },
  { title: 'State', text: (c) => (!c.ready ? 'loading' : c.restoring ? 'restoring history' : 'ready'), tone: (c) => (c.ready ? 'good' : 'warn') },
  { title: 'Revision', number: true, text: (c) => count(c.revision) },
  { title: 'Compacted', number: true, wide: true, text: (c) => count(c.compactedRevision) },
  { title: 'History', number: true, wide: true, text: (c) => bytes(c.historyBytes) },
  { title: 'Relists', number: true, wide: true, text: (c) => count(c.relists) },
  { title: 'Reconnects', number: true, wide: true, text: (c) => count(c.reconnects) },
  { title: 'Repairs', number: true, wide: true, text: (c) => count(c.repairs) },
];

const readiness = [
  { title: 'Check', value: (c) => c.name, text: (c) => c.name },
  { title: 'Result', value: (c) => c.result, text: (c) => c.result, tone: (c) => (c.result === 'ok' ? 'good' : 'bad') },
];

const alive = (l) => l.renewed && Date.now() - new Date(l.renewed) < 1000 * l.seconds;

const tables = {};

export function setUp() {
  const table = (name, columns, key, caption, empty, sort, descending) => {
    tables[name] = new Table(byId(`${name}-table`), { columns, key, caption, empty, sort, descending });
  };
  table('watches', slow, (w) => w.id, '', 'No watch is slow.', slow[3], true);
  table('checks', checks, resourceName, '', 'No resource was compared yet: the first comparisons run minutes after the start.', checks[0]);
  table('servers', servers, (l) => l.name, 'By their identity leases in the namespace kube-system', 'There are no identity leases.', servers[0]);
  table('clusters', clusters, (c) => `${c.endpoints} ${c.prefix}`, '', 'None.');
  table('readiness', readiness, (c) => c.name, '/readyz', 'Unknown.', readiness[1]);
}

/** Removes the rows. */
export function forget() {
  for (const table of Object.values(tables)) table.update([]);
}

export function update() {
  const last = readings.at(-1);
  if (!last) return;
  if (!byId('watches').hidden) {
    const { slow: all, slowWatches: shown } = last.status;
    tables.watches.caption.textContent = all > shown.length ? `the ${shown.length} slowest of ${count(all)}` : '';
    const seen = new Map(); // two watches of one user may have begun at once
    tables.watches.update(shown.map((w) => {
      const name = `${resourceName(w)} ${w.user} ${w.namespace} ${w.since}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      return { ...w, id: `${name} ${seen.get(name)}` };
    }));
  }
  if (!byId('servers').hidden) tables.clusters.update(last.status.clusters);
}

export async function loadChecks(signal) {
  const { items } = await get('/debug/strata/consistency', { signal });
  const failed = items.filter((c) => c.status !== 'success').length;
  tables.checks.caption.textContent = `${items.length} resources, ${failed ? `${failed} not equal` : 'all equal to etcd'}`;
  tables.checks.update(items);
}

export async function loadServers(signal) {
  const selector = encodeURIComponent('apiserver.kubernetes.io/identity=kube-apiserver');
  const leases = await get(`/apis/coordination.k8s.io/v1/namespaces/kube-system/leases?labelSelector=${selector}&limit=200`, { signal });
  tables.servers.update((leases.items ?? []).map(({ metadata, spec }) => ({
    name: metadata.name, host: metadata.labels?.['kubernetes.io/hostname'] ?? '–', holder: spec.holderIdentity ?? '–', renewed: spec.renewTime, seconds: spec.leaseDurationSeconds ?? 0,
  })));
  const text = await get('/readyz?verbose', { accept: 'text/plain', text: true, signal }).catch((error) => {
    if (error.status === 0 || signal.aborted) throw error;
    return error.body; // not ready: the answer has the checks too
  });
  tables.readiness.update([...text.matchAll(/^\[([+-])\](\S+) (.*)$/gm)].map(([, , name, result]) => ({ name, result })));
}
