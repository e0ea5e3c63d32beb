package access

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// nodeSees reports whether a node may see the object with the mark: the pods that run on it, and
// the Secrets and ConfigMaps that those mount.
func nodeSees(node string) func(mark string) bool {
	return func(mark string) bool {
		parts := strings.Split(mark, ".")
		resource, namespace, name := parts[1], parts[2], parts[3]
		switch resource {
		case "nodes":
			return name == node
		case "pods":
			return namespace == "nodes" && strings.HasPrefix(name, node+"-")
		case "secrets", "configmaps":
			return namespace == "nodes" && name == "for-"+node
		}
		return resource == "services" // nodes may read all of them
	}
}

// selectors of pods: those that nodes send, and invalid ones. ME is replaced by the node's own
// name, OTHER by another node's.
var podSelectors = []string{
	"", "spec.nodeName=ME", "spec.nodeName==ME", "spec.nodeName=OTHER", "spec.nodeName=", "spec.nodeName!=OTHER", "spec.nodeName!=ME", "spec.nodeName",
	"spec.nodeName=ME,spec.nodeName=ME", "spec.nodeName=ME,spec.nodeName=OTHER", "spec.nodeName=OTHER,spec.nodeName=ME",
	"spec.nodeName=ME,spec.nodeName!=ME", "spec.nodeName!=OTHER,spec.nodeName=ME", "spec.nodeName=ME,status.phase!=Failed", "status.phase=Pending",
	"spec.nodeName=ME,metadata.namespace=nodes", "spec.nodeName=ME,metadata.name=ME-x", "spec.nodeName=ME,metadata.name=OTHER-x", "spec.nodeName=OTHER,metadata.name=ME-x",
	"metadata.name=ME-x", "metadata.name=OTHER-x", "metadata.name=ME-x,spec.nodeName=OTHER", "spec.nodename=ME", "spec.nodeName=ME,x=y",
}

// TestNodeAuthorizer_ReadsObjectsOfNodeOnly: a node lists and watches the pods bound to it, if its
// selector asks for exactly those, and reads the Secrets and ConfigMaps that they mount. With any
// other selector it sees no other objects.
func TestNodeAuthorizer_ReadsObjectsOfNodeOnly(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	const watch = "watch=true&timeoutSeconds=1&resourceVersion=0&"
	const initial = "watch=true&timeoutSeconds=1&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&allowWatchBookmarks=true&"
	users := []struct {
		user, me, other string
		sees            func(string) bool
	}{
		{nodeA, "node-a", "node-b", nodeSees("node-a")},
		{nodeB, "node-b", "node-a", nodeSees("node-b")},
		{nodeAgent, "none", "node-a", nodeSees("none")},
		{noNode, "node-a", "node-b", nil},
		{notInGroup, "node-a", "node-b", nil},
		{nothing, "node-a", "node-b", nil},
	}
	var requests []asked
	for _, u := range users {
		want := expectation{refused: -1, sees: u.sees}
		add := func(r request) {
			r.user = u.user
			requests = append(requests, asked{r, want})
		}
		selector := func(text string) string {
			return "fieldSelector=" + url.QueryEscape(strings.NewReplacer("ME", u.me, "OTHER", u.other).Replace(text))
		}
		mine, theirs := selector("spec.nodeName=ME"), selector("spec.nodeName=OTHER")
		for _, path := range []string{pods.path(""), pods.path("nodes")} {
			for _, s := range podSelectors {
				for _, query := range []string{"", "resourceVersion=0&", "limit=1&", watch, initial} {
					add(request{target: path + "?" + query + selector(s)})
				}
			}
			for _, query := range []string{mine + "&" + theirs, theirs + "&" + mine, mine + "&fieldSelector=", "fieldSelector=&" + mine, mine + "&labelSelector=all%3Dtrue", mine + "&limit=x", mine + "&resourceVersion=x", mine + "&a=%zz", mine + ";x=y"} {
				for _, verb := range []string{"", watch, initial} {
					add(request{target: path + "?" + verb + query})
				}
			}
			for _, media := range []string{protobuf, table, partialList, partialListBeta, partial, partialProto} {
				for _, verb := range []string{"", watch} {
					add(request{target: path + "?" + verb + mine, header: accept(media)})
					add(request{target: path + "?" + verb + theirs, header: accept(media)})
					add(request{target: path + "?" + verb + selector("spec.nodeName=ME,spec.nodeName=OTHER"), header: accept(media)})
				}
			}
			// A continue token of a broader list does not show more to a node.
			for _, list := range []string{path + "?limit=1", path + "?limit=1&fieldSelector=spec.nodeName%3Dnode-b", path + "?limit=3"} {
				add(request{target: path + "?limit=1&continue=TOKEN", list: list})
				add(request{target: path + "?limit=1&continue=TOKEN&" + mine, list: list})
				add(request{target: path + "?continue=TOKEN&" + theirs, list: list})
				add(request{target: path + "?continue=TOKEN&" + selector("spec.nodeName=ME,spec.nodeName=OTHER"), list: list})
			}
			// A watch by path has no selectors to authorize.
			add(request{target: strings.Replace(path, "/v1/", "/v1/watch/", 1) + "?" + watch + mine})
		}
		for _, node := range []string{u.me, u.other} {
			for _, name := range []string{node + "-x", node + "-y"} {
				add(request{target: pods.path("nodes") + "/" + name})
				add(request{target: pods.path("nodes") + "/" + name + "?" + mine})
				add(request{target: pods.path("nodes") + "/" + name + "?" + watch + mine})
				add(request{target: pods.path("nodes") + "/" + name + "/status"})
			}
			add(request{target: nodes.path("") + "/" + node})
			for _, r := range []resource{secrets, configMaps} {
				name := "for-" + node
				for _, query := range []string{"", watch, initial} {
					add(request{target: r.path("nodes") + "?" + query + "fieldSelector=metadata.name%3D" + name})
				}
				add(request{target: r.path("nodes") + "?fieldSelector=metadata.name%3D" + name, header: accept(protobuf)})
				add(request{target: r.path("nodes") + "?fieldSelector=metadata.name%3D" + name + "&fieldSelector=metadata.name%3Dfor-" + u.other})
				add(request{target: r.path("nodes") + "/" + name})
				add(request{target: r.path("nodes") + "/" + name, header: accept(protobuf)})
				add(request{target: r.path("nodes") + "/" + name, header: accept(table)})
				add(request{target: r.path("nodes") + "/" + name + "?resourceVersion=0"})
			}
		}
		for _, r := range []resource{secrets, configMaps} {
			for _, target := range []string{r.path(""), r.path("nodes"), r.path("a"), r.path("a") + "/one", r.path("nodes") + "?" + watch, r.path("nodes") + "/nothing"} {
				add(request{target: target})
			}
		}
	}
	w.same(t, ctx, "nodes", requests)
	for _, a := range []struct {
		user, target string
		code         int
	}{
		{nodeA, pods.path("") + "?fieldSelector=spec.nodeName%3Dnode-a", http.StatusOK},
		{nodeA, pods.path("") + "?fieldSelector=spec.nodeName%3Dnode-b", http.StatusForbidden},
		{nodeA, pods.path(""), http.StatusForbidden},
		{noNode, pods.path("") + "?fieldSelector=spec.nodeName%3Dnode-a", http.StatusForbidden},
		{notInGroup, pods.path("") + "?fieldSelector=spec.nodeName%3Dnode-a", http.StatusForbidden},
		{nodeA, secrets.path("nodes") + "/for-node-a", http.StatusOK},
		{nodeA, secrets.path("nodes") + "/for-node-b", http.StatusForbidden},
		{nodeA, secrets.path("nodes"), http.StatusForbidden},
	} {
		resp, err := w.strata.patient(ctx, request{user: a.user, target: a.target})
		harness.Check(t, err)
		if resp.Code != a.code {
			t.Errorf("%s as %s: %v, want %d", a.target, a.user, resp.Err(), a.code)
		}
	}
}

// TestNodeAuthorizer_Watch_DeliversOwnPodsOnly: no watch that a node may open delivers events of
// other nodes' pods.
func TestNodeAuthorizer_Watch_DeliversOwnPodsOnly(t *testing.T) {
	// not in parallel: others count pods
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	list, err := w.strata.API().List(ctx, pods.path(""), "")
	harness.Check(t, err)
	var running sync.WaitGroup
	for _, e := range w.each() {
		running.Go(func() {
			if err := watchesOnlyItsPods(t, ctx, e, list.Metadata.ResourceVersion); err != nil {
				t.Errorf("%s: %v", e.name, err)
			}
		})
	}
	running.Wait()
}

func watchesOnlyItsPods(t *testing.T, ctx context.Context, e *engine, revision string) error {
	type watch struct {
		*harness.Watch
		selector string
		none     bool // shows no pod at all, and ends by itself
	}
	var watches []watch
	node := e.APIFor(e.ConfigFor(tokenOf(nodeA)))
	for selector, none := range map[string]bool{
		"spec.nodeName=node-a":                       false,
		"spec.nodeName=node-a,spec.nodeName=node-a":  false,
		"spec.nodeName=node-a,spec.nodeName!=node-b": false,
		"spec.nodeName=node-a,spec.nodeName=node-b":  true,
		"spec.nodeName=node-b,spec.nodeName=node-a":  true,
	} {
		for _, path := range []string{pods.path(""), pods.path("nodes")} {
			for _, media := range []string{"application/json", partial} {
				query := "resourceVersion=" + revision + "&fieldSelector=" + url.QueryEscape(selector)
				if none {
					query += "&timeoutSeconds=3"
				}
				opened, refusal, err := node.WatchAs(ctx, path, query, media)
				for err == nil && refusal != nil && refusal.Refused() { // the node is not exempt
					harness.Pause(ctx, time.Second)
					opened, refusal, err = node.WatchAs(ctx, path, query, media)
				}
				if err != nil {
					return err
				}
				if refusal != nil {
					return fmt.Errorf("%s: %w", query, refusal.Err())
				}
				watches = append(watches, watch{opened, selector, none})
			}
		}
	}
	later := "-" + e.name
	for _, node := range []string{"node-b", "node-a"} { // the last one to be seen
		if _, err := e.API().Create(ctx, pods.path("nodes"), pod("nodes", node+later, node)); err != nil {
			return err
		}
	}
	for _, watch := range watches {
		names, err := namesOf(ctx, watch.Watch, "node-a"+later)
		if err != nil {
			return err
		}
		if len(names) == 0 != watch.none {
			t.Errorf("%s: a watch of %s shows %v", e.name, watch.selector, names)
		}
		for _, name := range names {
			if !strings.HasPrefix(name, "node-a-") {
				t.Errorf("%s: a watch of %s shows %s", e.name, watch.selector, name)
			}
		}
	}
	for _, node := range []string{"node-b", "node-a"} {
		if err := e.API().Delete(ctx, pods.path("nodes")+"/"+node+later+"?gracePeriodSeconds=0"); err != nil {
			return err
		}
	}
	return nil
}

// namesOf returns the names that a watch delivers, until it delivers last or ends.
func namesOf(ctx context.Context, w *harness.Watch, last string) ([]string, error) {
	defer w.Close()
	var names []string
	for {
		e, err := w.Next(ctx)
		if errors.Is(err, harness.ErrEnded) {
			return names, nil
		}
		if err != nil {
			return names, err
		}
		if e.Type == "BOOKMARK" {
			continue
		}
		names = append(names, e.Object.Metadata.Name)
		if e.Object.Metadata.Name == last {
			return names, nil
		}
	}
}
