// format makes texts of values, in one place so that all sections agree.

export const count = (n) => n.toLocaleString('en');

export function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

export function rate(n) {
  if (!Number.isFinite(n)) return '–';
  return n >= 100 ? count(Math.round(n)) : n.toFixed(1);
}

export function seconds(n) {
  if (n < 1) return `${Math.round(n * 1000)} ms`;
  if (n < 120) return `${n.toFixed(n < 10 ? 1 : 0)} s`;
  if (n < 7200) return `${Math.round(n / 60)} min`;
  return `${Math.round(n / 3600)} h`;
}

/** The time since a moment. */
export const ago = (moment, now = Date.now()) => `${seconds(Math.max(0, (now - new Date(moment)) / 1000))} ago`;

export const time = (moment) => new Date(moment).toLocaleTimeString('en-GB');

export const percent = (part, whole) => (whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : '–');

/** The name of a resource with its group, as kubectl accepts it. */
export const resourceName = ({ resource, group }) => (group ? `${resource}.${group}` : resource);
