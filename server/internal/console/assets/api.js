// api sends the requests of the page. All are reads, except for the two that begin and end a session.

const page = '/debug/strata/console/';
const stored = 'strata-console-session';

/** The path before the paths of the server: a proxy may serve it below a prefix. */
const base = location.pathname.slice(0, Math.max(0, location.pathname.indexOf(page)));

/** A request that failed. status is 0 if there is no answer. */
export class Failure extends Error {
  constructor(status, message, body = '') {
    super(message);
    Object.assign(this, { status, body });
  }
}

// The token of the session is in the session storage of this tab: no other port, host or scheme gets it, as it would a cookie.
let token = sessionStorage.getItem(stored) ?? '';

export const hasSession = () => token !== '';

/** Begins a session if the fragment of the address has the token of a link. The fragment is removed first. */
export async function beginSession() {
  const link = new URLSearchParams(location.hash.slice(1)).get('token');
  if (!link) return;
  history.replaceState(null, '', location.pathname);
  const response = await send('/debug/strata/console/session', { method: 'POST', body: JSON.stringify({ token: link }), headers: { 'Content-Type': 'application/json' } });
  if (!response.ok) {
    if (token) return; // the session of this tab continues
    throw await failure(response);
  }
  ({ token } = await response.json());
  sessionStorage.setItem(stored, token);
}

/** Ends the session. This tab forgets its token first, so that it has no session whatever the server answers. */
export async function endSession() {
  const headers = authorization();
  token = '';
  sessionStorage.removeItem(stored);
  const response = await send('/debug/strata/console/session', { method: 'DELETE', headers }, 'The server does not answer.');
  if (!response.ok) throw await failure(response);
}

const authorization = () => (token ? { Authorization: `Bearer ${token}` } : {});

/** Gets a path of the server; the answer is decoded as JSON, or is text. */
export async function get(path, { accept = 'application/json', signal, text = false } = {}) {
  const response = await send(path, { headers: { ...authorization(), Accept: accept }, signal });
  if (!response.ok) throw await failure(response);
  return text ? response.text() : response.json();
}

async function send(path, options, unreachable = 'The server does not answer. The console retries.') {
  try {
    return await fetch(base + path, { ...options, cache: 'no-store', credentials: 'same-origin', redirect: 'error', referrerPolicy: 'no-referrer' });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure(0, unreachable);
  }
}

async function failure(response) {
  const body = await response.text();
  let message = body.trim();
  try {
    message = JSON.parse(body).message ?? message;
  } catch { /* not a Status */ }
  switch (response.status) {
    case 401:
      message = token
        ? 'The session has ended. `strata console` prints a link for another one.'
        : 'There is no session. `strata console` prints a link; or open this page through `kubectl proxy`.';
      break;
    case 403:
      message = `Not permitted: ${message}`;
      break;
    case 410:
      message = `The revision is no longer readable: ${message}`;
      break;
    case 429:
      message = `The server is busy: ${message}`;
      break;
    default:
      message = `The server answered ${response.status}: ${message.slice(0, 300)}`;
  }
  return new Failure(response.status, message, body);
}
