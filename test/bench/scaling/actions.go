package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// renewLease updates the lease of node i, as a kubelet does.
func (c *cluster) renewLease(ctx context.Context, conn *target.Conn, i int) error {
	lease := c.leases[i%len(c.leases)]
	lease.Lock()
	defer lease.Unlock()
	now := metav1.NowMicro()
	lease.obj.Spec.RenewTime = &now
	lease.obj.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	renewed, err := sendAs[*coordinationv1.Lease](ctx, conn, http.MethodPut, leasePath+"/"+lease.obj.Name, lease.obj, http.StatusOK)
	if err != nil {
		return err
	}
	lease.obj = renewed
	c.count(scaling.LeaseUpdate)
	return nil
}

// reportNode updates the status of node i.
func (c *cluster) reportNode(ctx context.Context, conn *target.Conn, i int) error {
	defer c.count(scaling.NodeStatus)
	_, err := patch(ctx, conn, nodePath+"/"+nodeName(i%c.shape.Nodes)+"/status", heartbeat(time.Now()))
	return err
}

// createPod creates pod i, as a ReplicaSet's controller does.
func (c *cluster) createPod(ctx context.Context, i int) (*corev1.Pod, error) {
	pod := newPod(i)
	pod.Namespace = c.podNamespace(i)
	defer c.count(scaling.PodCreate)
	created, err := sendAs[*corev1.Pod](ctx, c.conn(i), http.MethodPost, podsPath(pod.Namespace), pod, http.StatusCreated)
	if err != nil {
		return nil, err
	}
	created.Spec.NodeName = nodeName(i % c.shape.Nodes) // where bind will bind it
	return created, nil
}

// bind binds a pod to its node, as kube-scheduler does.
func (c *cluster) bind(ctx context.Context, pod *corev1.Pod) error {
	var body bytes.Buffer
	if err := serializer.Encode(&corev1.Binding{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Binding"},
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: pod.Spec.NodeName},
	}, &body); err != nil {
		return err
	}
	c.count(scaling.PodBind)
	return c.conn(0).Read(ctx, target.Request{
		Method: http.MethodPost, Path: podPath(pod) + "/binding", Accept: protobufType, Body: body.Bytes(), ContentType: protobufType, Status: http.StatusCreated,
	}, new(bytes.Buffer))
}

func podPath(pod *corev1.Pod) string { return podsPath(pod.Namespace) + "/" + pod.Name }

func (c *cluster) patchStatus(ctx context.Context, conn *target.Conn, pod *corev1.Pod, phase corev1.PodPhase) error {
	c.count(scaling.PodStatus)
	_, err := patch(ctx, conn, podPath(pod)+"/status", podStatus(pod, phase, time.Now()))
	return err
}

func (c *cluster) getPod(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
	c.count(scaling.Get)
	return discard(ctx, conn, http.MethodGet, podPath(pod), http.StatusOK)
}

// deletePod begins the deletion of a pod with the usual grace period.
func (c *cluster) deletePod(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
	c.count(scaling.PodDelete)
	return discard(ctx, conn, http.MethodDelete, podPath(pod)+"?gracePeriodSeconds=30", http.StatusOK)
}

// removePod ends the deletion, as the kubelet does when the containers have stopped.
func (c *cluster) removePod(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
	c.count(scaling.PodRemove)
	return discard(ctx, conn, http.MethodDelete, podPath(pod)+"?gracePeriodSeconds=0", http.StatusOK)
}

func (c *cluster) createEvent(ctx context.Context, conn *target.Conn, pod *corev1.Pod, reason string) error {
	c.count(scaling.EventCreate)
	_, err := send(ctx, conn, http.MethodPost, "/api/v1/namespaces/"+pod.Namespace+"/events", newEvent(pod, c.events.Add(1), reason), http.StatusCreated)
	return err
}

// updateSlice changes the endpoints of slice i, as the controller of EndpointSlices does.
func (c *cluster) updateSlice(ctx context.Context, i, endpoints int) error {
	slice := c.slices[i%len(c.slices)]
	slice.Lock()
	defer slice.Unlock()
	changed := newSlice(i%len(c.slices), endpoints, i)
	changed.ObjectMeta = slice.obj.ObjectMeta
	updated, err := sendAs[*discoveryv1.EndpointSlice](ctx, c.conn(i), http.MethodPut, slicePath+"/"+changed.Name, changed, http.StatusOK)
	if err != nil {
		return err
	}
	slice.obj = updated
	c.count(scaling.SliceUpdate)
	return nil
}

// requestToken requests a token for a pod, as a kubelet does.
func (c *cluster) requestToken(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
	c.count(scaling.Token)
	body := fmt.Appendf(nil, `{"kind":"TokenRequest","apiVersion":"authentication.k8s.io/v1","spec":{"expirationSeconds":3607,"boundObjectRef":{"kind":"Pod","apiVersion":"v1","name":%q,"uid":%q}}}`, pod.Name, pod.UID)
	return conn.Read(ctx, target.Request{
		Method: http.MethodPost, Path: "/api/v1/namespaces/" + pod.Namespace + "/serviceaccounts/default/token", Body: body, Status: http.StatusCreated,
	}, new(bytes.Buffer))
}

// listNamespace lists the pods of one namespace.
func (c *cluster) listNamespace(ctx context.Context, i int) error {
	c.count(scaling.List)
	return discard(ctx, c.conn(i), http.MethodGet, podsPath(namespaceName(i*scaling.ListPods%c.shape.Pods))+"?resourceVersion=0", http.StatusOK)
}

// reasons of the Events of a pod.
var reasons = [...]string{"Scheduled", "Pulling", "Pulled", "Created", "Started"}

// replacePod starts one pod and ends the oldest one: every step of a pod's life, by the clients that take it. With kwok, the steps of
// kubelets are left to kwok.
func (c *cluster) replacePod(ctx context.Context, nodes []*target.Conn) error {
	c.mu.Lock()
	index, old := c.created, c.live[0]
	c.created++
	c.live = c.live[1:]
	c.mu.Unlock()

	pod, err := c.createPod(ctx, index)
	if err != nil {
		return err
	}
	node, oldNode := nodes[index%len(nodes)], nodes[index%len(nodes)] // any node: what a request costs does not depend on its connection
	steps := []func() error{
		func() error { return c.bind(ctx, pod) },
		func() error { return c.requestToken(ctx, node, pod) },
		func() error { return c.getPod(ctx, node, pod) },
		func() error {
			return c.kubelet(func() error { return c.patchStatus(ctx, node, pod, corev1.PodRunning) })
		},
		func() error { return c.updateSlice(ctx, index, c.shape.SliceEndpoints) },
		func() error { return c.getPod(ctx, oldNode, old) },
		func() error { return c.deletePod(ctx, c.conn(index), old) },
		func() error {
			return c.kubelet(func() error { return c.patchStatus(ctx, oldNode, old, corev1.PodSucceeded) })
		},
		func() error { return c.kubelet(func() error { return c.removePod(ctx, oldNode, old) }) },
	}
	for _, reason := range reasons {
		steps = append(steps, func() error { return c.createEvent(ctx, node, pod, reason) })
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	c.mu.Lock()
	c.live = append(c.live, pod)
	c.mu.Unlock()
	return nil
}

// kubelet runs a step of a kubelet, unless kwok takes it.
func (c *cluster) kubelet(step func() error) error {
	if c.kwok {
		return nil
	}
	return step()
}

// livePod returns a pod that will live for a while.
func (c *cluster) livePod(i int) (*corev1.Pod, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.live) == 0 {
		return nil, errors.New("there are no pods")
	}
	return c.live[len(c.live)/2+i%(len(c.live)/2+1)%(len(c.live)-len(c.live)/2)], nil
}
