package recorded

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
)

// checkTimeout bounds the time to read the rest of the history.
const checkTimeout = 2 * time.Minute

// All records every watch that tests make with harness.API, and judges them all when the
// environment ends. All API servers of the environment have to store their objects in etcd,
// unencrypted, and the environment must not compact the watched revisions. Watches whose initial
// state has no marked end (resourceVersion unset or 0), and watches of resources whose keys cannot
// be derived from their path, are omitted.
func All(e *harness.Env, etcd *harness.Etcd) {
	ctx, cancel := context.WithCancel(context.Background())
	e.AtEnd(cancel)
	history, err := follow(ctx, etcd.Client(), "/registry/")
	if err != nil {
		e.BeforeEnd(func() error { return fmt.Errorf("follow the history of etcd: %w", err) })
		return
	}
	var mu sync.Mutex // leaf
	var all []*observed
	e.ObserveWatches(func(_, path, query string) func(harness.Event) {
		o := observe(path, query)
		if o == nil {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, o)
		return o.session.Add
	})
	e.BeforeEnd(func() error {
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		defer cancel()
		reference, err := history.Now(ctx)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		judged := 0
		parts := map[string]*watchcheck.History{}
		for _, o := range all {
			if parts[o.prefix] == nil {
				parts[o.prefix] = reference.Under(o.prefix)
			}
			sessions, err := o.sessions.Recorded(0)
			if o.session.unfinished() || sessions[0].After < reference.From {
				continue
			}
			judged++
			if err == nil {
				err = parts[o.prefix].View(o.sel).Check(sessions)
			}
			if err != nil {
				return fmt.Errorf("watch of %s: %w", o.what, err)
			}
		}
		fmt.Printf("%d watches met their guarantees\n", judged)
		return nil
	})
}

// observed is one watch.
type observed struct {
	what     string
	prefix   string // of the keys of the resource
	sel      watchcheck.Select
	sessions Sessions
	session  *Session
}

// observe returns the watch to judge; nil if it is omitted.
func observe(path, query string) *observed {
	values, err := url.ParseQuery(query)
	if err != nil {
		return nil
	}
	resource, namespace := parsePath(path)
	byLabels, err := labels.Parse(values.Get("labelSelector"))
	if err != nil || resource == "" {
		return nil
	}
	byFields, err := fields.ParseSelector(values.Get("fieldSelector"))
	if err != nil {
		return nil
	}
	for _, r := range byFields.Requirements() {
		switch r.Field {
		case "metadata.name", "metadata.namespace", "spec.nodeName":
		default:
			return nil
		}
	}
	o := &observed{what: path + "?" + query, prefix: "/registry/" + resource + "/"}
	o.sel = func(key string, state any) bool {
		stored := state.(*Object)
		in, name, ok := strings.Cut(key, "/")
		if !ok {
			in, name = "", key
		}
		return (namespace == "" || in == namespace) && byLabels.Matches(labels.Set(stored.Labels)) &&
			byFields.Matches(fields.Set{"metadata.name": name, "metadata.namespace": in, "spec.nodeName": stored.Node})
	}
	after, err := strconv.ParseInt(values.Get("resourceVersion"), 10, 64)
	initial := values.Get("sendInitialEvents") == "true" && values.Get("allowWatchBookmarks") == "true"
	switch {
	case initial:
		o.session = o.sessions.Begin(0).WithInitialEvents()
	case err == nil && after > 0 && values.Get("sendInitialEvents") != "true":
		o.session = o.sessions.Begin(after)
	default:
		return nil
	}
	return o
}

// parsePath returns the storage path of a collection, and its namespace; "" if unknown.
func parsePath(path string) (resource, namespace string) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	group := ""
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		group, parts = parts[1], parts[3:]
	default:
		return "", ""
	}
	if len(parts) == 3 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	if len(parts) != 1 {
		return "", ""
	}
	switch group {
	case "":
		switch parts[0] {
		case "configmaps", "secrets", "pods", "serviceaccounts", "limitranges", "podtemplates":
			return parts[0], namespace
		}
	case "coordination.k8s.io":
		return parts[0], namespace
	default:
		if strings.Contains(group, "example") { // a custom resource of a test
			return group + "/" + parts[0], namespace
		}
	}
	return "", ""
}
