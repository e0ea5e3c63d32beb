package samebytes

import (
	"context"
	"fmt"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// Names that only a direct write to etcd can give. (An object without a name, with a percent sign
// in it, or with a name or namespace other than that of its key, prevents upstream's cacher from
// becoming ready.)
const (
	nameUnicode = "ünï-東京"
	nameUpper   = "UPPER_case"
	nameSpaces  = "a b+c&d=e?f#g"
)

// storeOdd writes objects to etcd that the API would refuse or complete: as old releases stored
// them, without today's defaults, in other encodings, with invalid UTF-8.
func storeOdd(ctx context.Context, kv *clientv3.Client) error {
	for key, value := range merged(
		oddConfigMaps(), oldClaims(), oldPods(), oddWidgets(), oldAPIServices(), oldWorkloads(),
	) {
		if err := put(ctx, kv, "/registry/"+key, value); err != nil {
			return err
		}
	}
	return nil
}

func merged(all ...map[string]string) map[string]string {
	m := map[string]string{}
	for _, some := range all {
		for k, v := range some {
			m[k] = v
		}
	}
	return m
}

// metadata returns the metadata of an object in namespace odd, as JSON, with additional fields.
func metadata(name string, more ...string) string {
	return fmt.Sprintf(`{"name":%s,"namespace":%q,"uid":"uid-%x","creationTimestamp":"2019-01-02T03:04:05Z"%s}`,
		encoded(name), oddNamespace, name, strings.Join(append([]string{""}, more...), ","))
}

// oddConfigMaps are unusual values that can still be decoded.
func oddConfigMaps() map[string]string {
	const dir = "configmaps/" + oddNamespace + "/"
	configMap := func(metadata, rest string) string {
		return `{"kind":"ConfigMap","apiVersion":"v1","metadata":` + metadata + rest + "}"
	}
	notText := func(name string) *corev1.ConfigMap {
		return &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: oddNamespace, Annotations: map[string]string{"not": "te\xffxt", "cut": "\xe6\x9d"}},
			Data:       map[string]string{"not": "\xc3\x28 \xff", "surrogate": "\xed\xa0\x80", "overlong": "\xc0\xaf"},
			BinaryData: map[string][]byte{"all": {0, 1, 0xfe, 0xff}},
		}
	}
	return map[string]string{
		dir + "json-stored":        configMap(metadata("json-stored"), `,"data":{"b":"2","a":"1"}`),
		dir + "json-no-newline":    configMap(metadata("json-no-newline"), "") + "   \n\n",
		dir + "json-unknown":       configMap(metadata("json-unknown", `"unknown":{"x":1}`), `,"data":{"a":"1"},"Data":{"upper":"1"},"spec":{"gone":true}`),
		dir + "json-twice":         configMap(metadata("json-twice"), `,"data":{"a":"1"},"data":{"b":"2"}`),
		dir + "json-nulls":         configMap(metadata("json-nulls", `"labels":null,"annotations":null,"finalizers":null,"managedFields":null`), `,"data":null,"binaryData":null,"immutable":null`),
		dir + "json-not-text":      configMap(metadata("json-not-text"), `,"data":{"not":"te`+"\xff\xfe"+`xt","surrogate":"\ud800","pair":"\ud83d\ude42"}`),
		dir + "json-no-time":       configMap(`{"name":"json-no-time","namespace":"`+oddNamespace+`","creationTimestamp":null,"selfLink":"/api/v1/x","resourceVersion":"12345"}`, ""),
		dir + "json-old-metadata":  configMap(metadata("json-old-metadata", `"selfLink":"/api/v1/namespaces/odd/configmaps/x"`, `"clusterName":"old"`, `"generation":5`), ""),
		dir + "json-no-bool":       configMap(metadata("json-no-bool"), `,"immutable":false`),
		dir + "json-managed":       configMap(metadata("json-managed", `"managedFields":[{"manager":"kubectl","operation":"Update","apiVersion":"v1","time":"2019-01-02T03:04:05Z","fieldsType":"FieldsV1","fieldsV1":{ "f:data" : { "." : {}, "f:a<b" : {} } }}]`), `,"data":{"a":"1"}`),
		dir + "json-deleted":       configMap(metadata("json-deleted", `"deletionTimestamp":"2020-01-02T03:04:05Z"`, `"deletionGracePeriodSeconds":0`, `"finalizers":["example.com/never"]`), ""),
		dir + nameUnicode:          configMap(metadata(nameUnicode), ""),
		dir + nameUpper:            configMap(metadata(nameUpper), ""),
		dir + nameSpaces:           configMap(metadata(nameSpaces), ""),
		dir + "protobuf-not-text":  protobufOf(notText("protobuf-not-text")),
		dir + "protobuf-bare":      protobufOf(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "protobuf-bare", Namespace: oddNamespace}}),
		dir + "protobuf-zero-time": protobufOf(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "protobuf-zero-time", Namespace: oddNamespace, DeletionTimestamp: &metav1.Time{}, Labels: map[string]string{"": "", "é<": "&"}}}),
	}
}

// protobufOf returns a typed object in its stored form.
func protobufOf(o runtime.Object) string {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		panic(err) // callers pass only types of the scheme
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	data, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), o)
	if err != nil {
		panic(err) // typed objects of the scheme can be encoded
	}
	return string(data)
}

// oldServices lack fields that were added later and are defaulted on read: clusterIPs, ipFamilies,
// policies.
func oldServices() map[string]string {
	const dir = "services/specs/" + oddNamespace + "/"
	service := func(name, spec string) string {
		return `{"kind":"Service","apiVersion":"v1","metadata":` + metadata(name) + `,"spec":` + spec + `}`
	}
	old := map[string]string{
		"old-cluster-ip":    `{"type":"ClusterIP","clusterIP":"10.0.0.77","ports":[{"protocol":"TCP","port":80,"targetPort":80}],"selector":{"a":"b"},"sessionAffinity":"None"}`,
		"old-ipv6":          `{"type":"ClusterIP","clusterIP":"fd00::77","ports":[{"port":80}],"selector":{"a":"b"}}`,
		"old-headless":      `{"type":"ClusterIP","clusterIP":"None","ports":[{"port":80}],"selector":{"a":"b"}}`,
		"old-no-selector":   `{"type":"ClusterIP","clusterIP":"None","ports":[{"port":80}]}`,
		"old-external-name": `{"type":"ExternalName","externalName":"example.com"}`,
		"old-node-port":     `{"type":"NodePort","clusterIP":"10.0.0.78","ports":[{"port":80,"nodePort":30999}],"externalTrafficPolicy":"Local"}`,
		"old-load-balancer": `{"type":"LoadBalancer","clusterIP":"10.0.0.79","ports":[{"port":80,"nodePort":30998}]}`,
		"old-ip-family":     `{"type":"ClusterIP","clusterIP":"10.0.0.80","ipFamily":"IPv4","topologyKeys":["*"],"ports":[{"port":80}]}`,
		"old-only-ips":      `{"type":"ClusterIP","clusterIP":"10.0.0.81","clusterIPs":["10.0.0.81"],"ports":[{"port":80}]}`,
		"old-empty":         `{}`,
	}
	stored := map[string]string{}
	for name, spec := range old {
		stored[dir+name] = service(name, spec)
	}
	stored[dir+"old-protobuf"] = protobufOf(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "old-protobuf", Namespace: oddNamespace},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.0.0.82", Ports: []corev1.ServicePort{{Port: 80}}},
	})
	return stored
}

// oldClaims have only one of dataSource and dataSourceRef: the other is set on read.
func oldClaims() map[string]string {
	const dir = "persistentvolumeclaims/" + oddNamespace + "/"
	stored := map[string]string{}
	for name, spec := range map[string]string{
		"old-data-source":  `{"dataSource":{"apiGroup":"snapshot.storage.k8s.io","kind":"VolumeSnapshot","name":"s"}}`,
		"old-core-source":  `{"dataSource":{"kind":"PersistentVolumeClaim","name":"other"}}`,
		"only-reference":   `{"dataSourceRef":{"apiGroup":"x.example.com","kind":"X","name":"x"}}`,
		"other-namespace":  `{"dataSourceRef":{"apiGroup":"x.example.com","kind":"X","name":"x","namespace":"elsewhere"}}`,
		"old-no-source":    `{"accessModes":["ReadWriteOnce"]}`,
		"old-beta-storage": `{"volumeName":"v","resources":{"requests":{"storage":"1.5Gi"}}}`,
	} {
		stored[dir+name] = `{"kind":"PersistentVolumeClaim","apiVersion":"v1","metadata":` + metadata(name) + `,"spec":` + spec + `}`
	}
	return stored
}

// oldPods have almost no fields: the rest is defaulted on decoding.
func oldPods() map[string]string {
	const dir = "pods/" + oddNamespace + "/"
	pod := func(name, rest string) string {
		return `{"kind":"Pod","apiVersion":"v1","metadata":` + metadata(name) + rest + `}`
	}
	return map[string]string{
		dir + "old-minimal":   pod("old-minimal", `,"spec":{"containers":[{"name":"c","image":"i"}]}`),
		dir + "old-empty":     pod("old-empty", ``),
		dir + "old-account":   pod("old-account", `,"spec":{"serviceAccount":"old","nodeName":"node-a","containers":[{"name":"c"}]},"status":{"phase":"Failed"}`),
		dir + "old-one-ip":    pod("old-one-ip", `,"spec":{"containers":[]},"status":{"podIP":"10.2.2.2","hostIP":"1.2.3.4"}`),
		dir + "old-ephemeral": pod("old-ephemeral", `,"spec":{"containers":null,"volumes":[{"name":"v"}],"securityContext":{}}`),
		dir + "old-units":     pod("old-units", `,"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"0.100","memory":"1024Ki"},"limits":{"cpu":1}}}]}`),
	}
}

// oddWidgets are custom resources from before their schema had any rules, in several of their
// versions.
func oddWidgets() map[string]string {
	const dir = customGroup + "/widgets/" + oddNamespace + "/"
	widget := func(version, name, rest string) string {
		return `{"apiVersion":"` + customGroup + `/` + version + `","kind":"Widget","metadata":` + metadata(name) + rest + `}`
	}
	return map[string]string{
		dir + "old-beta":       widget("v1beta1", "old-beta", `,"spec":{"weight":1,"garbage":true}`),
		dir + "old-unserved":   widget("v1alpha1", "old-unserved", `,"spec":{"color":"<&>\u2028"}`),
		dir + "old-unpruned":   widget("v1", "old-unpruned", `,"spec":{"unknown":{"deep":[{"er":1}]},"sizes":[{"name":"n","extra":1},{}]},"status":{},"more":1`),
		dir + "old-nulls":      widget("v1", "old-nulls", `,"spec":null,"status":null`),
		dir + "old-null-field": widget("v1", "old-null-field", `,"spec":{"color":null,"replicas":null,"comment":null,"sizes":null}`),
		dir + "old-empty":      widget("v1", "old-empty", ``),
		dir + "old-numbers":    widget("v1", "old-numbers", `,"spec":{"replicas":9007199254740993,"ratio":1.0,"anything":{"float":1.0,"exp":1e3,"tiny":1e-9,"neg":-0.0,"max":18446744073709551615,"long":0.1000000000000000055511151231257827}}`),
		dir + "old-not-text":   widget("v1", "old-not-text", `,"spec":{"color":"te`+"\xff"+`xt","anything":{"s":"\ud800"}}`),
		dir + "old-types":      widget("v1", "old-types", `,"spec":{"color":"c","anything":{"b":true,"l":[[],[[]]],"":""}}`),
		dir + "old-order":      `{"zzz":1,"metadata":` + metadata("old-order", `"unknown":1`, `"labels":{"z":"1","a":"2"}`) + `,"kind":"Widget","apiVersion":"` + customGroup + `/v1","spec":{"replicas":1,"color":"b"}}`,
		customGroup + "/planets/old": `{"apiVersion":"` + customGroup + `/v1","kind":"Planet","metadata":{"name":"old","creationTimestamp":null},"html":"<&>",` +
			`"null":null,"list":[null,1,"x",1.50]}`,
	}
}

// oldAPIServices lack fields that are defaulted today.
func oldAPIServices() map[string]string {
	const dir = "apiregistration.k8s.io/apiservices/"
	return map[string]string{
		dir + "v1.old.example.com": `{"kind":"APIService","apiVersion":"apiregistration.k8s.io/v1beta1","metadata":{"name":"v1.old.example.com","uid":"u","creationTimestamp":"2019-01-02T03:04:05Z"},` +
			`"spec":{"service":{"namespace":"odd","name":"missing"},"group":"old.example.com","version":"v1","insecureSkipTLSVerify":true,"groupPriorityMinimum":10,"versionPriority":10}}`,
	}
}

// oldWorkloads are stored in versions that are no longer served, and lack the defaults of those
// versions.
func oldWorkloads() map[string]string {
	const template = `{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}`
	return map[string]string{
		"deployments/" + oddNamespace + "/old-extensions": `{"kind":"Deployment","apiVersion":"extensions/v1beta1","metadata":` + metadata("old-extensions") + `,"spec":{"template":` + template + `}}`,
		"deployments/" + oddNamespace + "/old-apps":       `{"kind":"Deployment","apiVersion":"apps/v1beta1","metadata":` + metadata("old-apps") + `,"spec":{"replicas":0,"rollbackTo":{"revision":3},"template":` + template + `}}`,
		"statefulsets/" + oddNamespace + "/old-apps":      `{"kind":"StatefulSet","apiVersion":"apps/v1beta1","metadata":` + metadata("old-apps") + `,"spec":{"serviceName":"s","template":` + template + `}}`,
		"daemonsets/" + oddNamespace + "/old-extensions":  `{"kind":"DaemonSet","apiVersion":"extensions/v1beta1","metadata":` + metadata("old-extensions") + `,"spec":{"template":` + template + `,"templateGeneration":4}}`,
		"ingress/" + oddNamespace + "/old-extensions": `{"kind":"Ingress","apiVersion":"extensions/v1beta1","metadata":` + metadata("old-extensions") +
			`,"spec":{"backend":{"serviceName":"s","servicePort":80},"rules":[{"http":{"paths":[{"backend":{"serviceName":"s","servicePort":"http"}}]}}]}}`,
		"cronjobs/" + oddNamespace + "/old-batch": `{"kind":"CronJob","apiVersion":"batch/v1beta1","metadata":` + metadata("old-batch") + `,"spec":{"schedule":"* * * * *","jobTemplate":{"spec":{"template":` + template + `}}}}`,
		"horizontalpodautoscalers/" + oddNamespace + "/old-annotated": `{"kind":"HorizontalPodAutoscaler","apiVersion":"autoscaling/v1","metadata":` +
			metadata("old-annotated", `"annotations":{"autoscaling.alpha.kubernetes.io/metrics":"[{\"type\":\"Resource\",\"resource\":{\"name\":\"memory\",\"targetAverageUtilization\":50}}]"}`) +
			`,"spec":{"scaleTargetRef":{"kind":"Deployment","name":"d"},"maxReplicas":3,"targetCPUUtilizationPercentage":80}}`,
	}
}
