// main begins the session, polls the state of the server, and shows the section that the address names.

import { beginSession, endSession, hasSession } from './api.js';
import { byId, setText } from './dom.js';
import { count, time } from './format.js';
import * as operations from './operations.js';
import * as overview from './overview.js';
import * as past from './past.js';
import * as resources from './resources.js';
import { forget, onStatus, start, stop } from './status.js';

const sections = ['overview', 'resources', 'past', 'watches', 'checks', 'servers'];
const refresh = 10000; // of checks and servers, which change slowly

let loading = new AbortController();
let timer = 0;
let ended = false; // the page has no sections any more

const problems = { status: '', section: '' };

/** Shows the problem of the status, or else that of the section. */
function problem(of, text) {
  problems[of] = text;
  const shown = problems.status || problems.section;
  byId('problem').hidden = !shown;
  setText(byId('problem'), shown);
}

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, '').split('/');
  const shown = sections.includes(name) ? name : 'overview';
  const changes = byId(shown).hidden;
  const focusIsHidden = byId('main').contains(document.activeElement) && !byId(shown).contains(document.activeElement);
  for (const section of sections) byId(section).hidden = section !== shown;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#/${shown}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  if (focusIsHidden) document.querySelector('nav a[aria-current]').focus();
  if (changes) scrollTo(0, 0);
  document.title = `${byId(`${shown}-title`).textContent} – Strata console`;
  loading.abort();
  loading = new AbortController();
  clearTimeout(timer);
  problem('section', '');
  if (shown === 'past') past.open(rest.join('/'));
  if (shown === 'checks') load(operations.loadChecks, loading.signal);
  if (shown === 'servers') load(operations.loadServers, loading.signal);
  update();
}

async function load(read, signal) {
  try {
    if (document.visibilityState === 'visible') {
      await read(signal);
      problem('section', '');
    }
  } catch (error) {
    if (!signal.aborted) problem('section', error.message);
  }
  if (!signal.aborted) timer = setTimeout(() => load(read, signal), refresh);
}

function update() {
  overview.update();
  resources.update();
  operations.update();
}

function connected(reading, error) {
  problem('status', error ? error.message : '');
  setText(byId('connection'), error ? (error.status === 0 ? 'Connection lost' : 'No data') : '');
  byId('connection').className = error ? 'bad' : '';
  if (reading) {
    const { status } = reading;
    setText(byId('server'), `${status.version ?? ''} · ${time(status.now)} · ${count(status.resources.length)} resources`);
  }
}

async function open() {
  try {
    await beginSession();
  } catch (error) {
    problem('status', error.message);
    setText(byId('connection'), 'No session');
    return;
  }
  byId('leave').hidden = !hasSession();
  start();
}

overview.setUp();
resources.setUp((name) => { location.hash = `#/past/${name}`; });
past.setUp();
operations.setUp();
let routed = false;
onStatus((reading, error) => {
  connected(reading, error);
  if (!routed && (reading || error.status === 403)) { // the first section needs the names of the resources, where they may be read
    routed = true;
    route();
  }
  update();
});
addEventListener('hashchange', () => {
  if (location.hash.startsWith('#token=') && ended) {
    location.reload(); // with the token of the link
  } else if (location.hash.startsWith('#token=')) {
    stop();
    open();
  } else if (location.hash === '#main') {
    byId('main').focus();
  } else if (routed && !ended) {
    route();
  }
});
byId('leave').addEventListener('click', async () => {
  clear();
  const next = '`strata console` prints a link for another one.';
  try {
    await endSession();
    problem('status', `The session has ended. ${next}`);
  } catch (error) {
    problem('status', error.status === 401 || error.status === 403 ? `The session had ended before. ${next}`
      : `This tab has removed its session, but the server may accept it until it expires or the server stops: ${error.message} ${next}`);
  }
});

/** Stops all timers and requests, and removes the data that the page has read. */
function clear() {
  ended = true;
  for (const part of [{ forget }, overview, resources, past, operations]) part.forget();
  loading.abort();
  clearTimeout(timer);
  byId('object').close();
  for (const id of ['main', 'object-title', 'object-text', 'server', 'connection']) byId(id).replaceChildren();
  byId('leave').hidden = true;
  document.querySelector('nav').hidden = true;
  problem('section', '');
  document.title = 'Strata console';
}
open();
