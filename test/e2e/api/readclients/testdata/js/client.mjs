// Reads from an API server with the JavaScript client, and prints what it has read as one JSON object.
// Arguments: a kubeconfig and a namespace in which there are ConfigMaps and a custom resource.
import http from 'node:http';
import { CoreV1Api, CustomObjectsApi, KubeConfig, Watch, makeInformer } from '@kubernetes/client-node';

const [kubeconfig, namespace] = process.argv.slice(2);
const config = new KubeConfig();
config.loadFromFile(kubeconfig);
const core = config.makeApiClient(CoreV1Api);
const custom = config.makeApiClient(CustomObjectsApi);
const gizmo = { group: 'test.example.com', version: 'v1', namespace, plural: 'gizmos' };
const result = {};

// The client decodes what is compressed and does not say so: look at the answers as they arrive.
const emit = http.ClientRequest.prototype.emit;
http.ClientRequest.prototype.emit = function (event, response, ...rest) {
  if (event === 'response' && this.path.endsWith('/configmaps')) result.encoding ??= response.headers['content-encoding'];
  return emit.call(this, event, response, ...rest);
};

const list = await core.listNamespacedConfigMap({ namespace });
result.listed = list.items.map((o) => o.metadata.name);
result.gizmo = (await custom.getNamespacedCustomObject({ ...gizmo, name: 'one' })).spec.want;
result.missing = await core.readNamespacedConfigMap({ namespace, name: 'nobody' }).then(() => 200, (error) => error.code);

// Events about the object that is made below, until it is gone.
const untilDeleted = () => {
  const events = [];
  let resolve;
  const done = new Promise((r) => { resolve = r; });
  const note = (event) => (o) => {
    if (o.metadata.name !== 'late') return;
    events.push(`${event} late`);
    if (event === 'delete') resolve(events);
  };
  return { note, done };
};

// Both return when whatever is written from now on will be seen: the first list is there, or the revision is given.
const inform = async (path, listFn) => {
  const { note, done } = untilDeleted();
  const informer = makeInformer(config, path, listFn);
  for (const event of ['add', 'update', 'delete']) informer.on(event, note(event));
  await informer.start();
  return { done: done.finally(() => informer.stop()) };
};
const watch = async (path) => {
  const { note, done } = untilDeleted();
  const event = { ADDED: 'add', MODIFIED: 'update', DELETED: 'delete' };
  const watching = await new Watch(config).watch(path, { resourceVersion: list.metadata.resourceVersion },
    (type, o) => note(event[type])(o), () => {});
  return { done: done.finally(() => watching.abort()) };
};

const maps = `/api/v1/namespaces/${namespace}/configmaps`;
const gizmos = `/apis/${gizmo.group}/${gizmo.version}/namespaces/${namespace}/gizmos`;
const following = await Promise.all([
  watch(maps),
  inform(maps, () => core.listNamespacedConfigMap({ namespace })),
  inform(gizmos, () => custom.listNamespacedCustomObject(gizmo)),
]);

await core.createNamespacedConfigMap({ namespace, body: { metadata: { name: 'late' } } });
await core.replaceNamespacedConfigMap({ namespace, name: 'late', body: { metadata: { name: 'late' }, data: { changed: 'yes' } } });
await core.deleteNamespacedConfigMap({ namespace, name: 'late' });
const late = { apiVersion: 'test.example.com/v1', kind: 'Gizmo', metadata: { name: 'late' } };
const made = await custom.createNamespacedCustomObject({ ...gizmo, body: late });
await custom.replaceNamespacedCustomObject({ ...gizmo, name: 'late', body: { ...made, spec: { want: 'less' } } });
await custom.deleteNamespacedCustomObject({ ...gizmo, name: 'late' });

[result.watched, result.informed, result.gizmos] = await Promise.all(following.map((f) => f.done));
console.log(JSON.stringify(result));
process.exit(0);
