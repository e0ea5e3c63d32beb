// Reads lists that are compressed in each way that Node has, and prints what they decode to.
// Standard input: {"url", "token", "lists": [{"target", "accept"}]}; standard output: [{"how", "target", "sha256", ...}].
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import http2 from 'node:http2';
import https from 'node:https';
import { gunzipSync } from 'node:zlib';

const { url, token, lists } = JSON.parse(readFileSync(0, 'utf8'));
const ca = readFileSync(process.env.NODE_EXTRA_CA_CERTS);
const session = http2.connect(url, { ca });

const collect = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return Buffer.concat(chunks);
};

const ways = {
  async fetch(target, headers) {
    const response = await fetch(url + target, { headers });
    return [response.headers.get('content-encoding'), Buffer.from(await response.arrayBuffer())];
  },
  https(target, headers) {
    return new Promise((resolve, reject) => {
      https.get(url + target, { headers: { ...headers, 'Accept-Encoding': 'gzip' } }, (response) => {
        collect(response).then((body) => resolve([response.headers['content-encoding'], gunzipSync(body)]), reject).catch(reject);
      }).on('error', reject);
    });
  },
  async http2(target, headers) {
    const stream = session.request({ ':path': target, ...headers, 'Accept-Encoding': 'gzip' });
    const answered = new Promise((resolve, reject) => stream.on('response', resolve).on('error', reject));
    const body = collect(stream);
    return [(await answered)['content-encoding'], gunzipSync(await body)];
  },
};

const readings = [];
for (const [how, read] of Object.entries(ways)) {
  for (const { target, accept } of lists) {
    const reading = { how, target, accept };
    try {
      const [encoding, body] = await read(target, { Authorization: `Bearer ${token}`, Accept: accept });
      Object.assign(reading, { encoding, bytes: body.length, sha256: createHash('sha256').update(body).digest('hex') });
    } catch (error) {
      reading.error = String(error.cause ?? error);
    }
    readings.push(reading);
  }
}
session.close();
console.log(JSON.stringify(readings));
