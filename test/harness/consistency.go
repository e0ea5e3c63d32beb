package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// checkInterval is the interval at which servers compare their caches with etcd: short, so that
	// even short tests include some checks.
	checkInterval = 4 * time.Second
	// checkTimeout bounds the last check of a server, and answerTimeout the request whether it
	// still serves.
	checkTimeout  = time.Minute
	answerTimeout = 5 * time.Second

	consistencyPath = "/debug/strata/consistency"
	// panicEnv makes a server panic when a check fails. The name is upstream's, whose checker reads
	// it too.
	panicEnv = "KUBE_WATCHCACHE_CONSISTENCY_CHECKER"

	uncheckedFlag = "unchecked: "
)

// Unchecked returns a flag for servers whose cache a test corrupts on purpose, or which cannot be
// checked at the end, with the reason. Such a server does not panic, and runs no periodic checks:
// the test requests them.
func Unchecked(why string) string { return uncheckedFlag + why }

// withoutUnchecked removes Unchecked from flags, and reports whether it was there.
func withoutUnchecked(flags []string) (left []string, unchecked bool) {
	left = slices.DeleteFunc(slices.Clone(flags), func(flag string) bool { return strings.HasPrefix(flag, uncheckedFlag) })
	return left, len(left) < len(flags)
}

// checkFlags returns the flags that enable periodic checks of an API server; none for upstream's
// engine.
func checkFlags(flags []string, unchecked bool) []string {
	switch {
	case engineOf(flags) != Strata:
		return nil
	case unchecked:
		return []string{"--strata-consistency-check-interval=0"}
	}
	return []string{"--strata-consistency-check-interval=" + checkInterval.String()}
}

// engineOf returns the engine selected by flags.
func engineOf(flags []string) string {
	engine := Engine()
	for _, flag := range flags {
		if chosen, ok := strings.CutPrefix(flag, "--engine="); ok {
			engine = chosen
		}
	}
	return engine
}

// Consistency is a server's report of the last check of a resource.
type Consistency struct {
	Group, Resource           string
	Revision                  int64
	Keys                      int64
	Hash, EtcdHash            string
	Status                    string // success, failure or error
	Error                     string
	Differences               int      // of a failure
	Missing, Extra, Differing []string // the first differences, as namespace/name
	Repaired                  bool     // they were read again
	Time                      time.Time
}

// Consistent makes the server compare its cache with etcd now and returns the results. The
// resource, as in configmaps or leases.coordination.k8s.io, is "" for all.
func (a *API) Consistent(ctx context.Context, resource string) ([]Consistency, error) {
	return a.consistency(ctx, http.MethodPost, url.Values{"resource": {resource}})
}

// LastConsistent returns the result of the last check of the resource, or of each resource if it is
// "".
func (a *API) LastConsistent(ctx context.Context, resource string) ([]Consistency, error) {
	return a.consistency(ctx, http.MethodGet, url.Values{"resource": {resource}})
}

// HashAt returns the hash of the cached objects of a resource at a revision.
func (a *API) HashAt(ctx context.Context, resource string, revision int64) (Consistency, error) {
	all, err := a.consistency(ctx, http.MethodGet, url.Values{"resource": {resource}, "revision": {strconv.FormatInt(revision, 10)}})
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("hash of %s at %d: %d items", resource, revision, len(all))
	}
	if err != nil {
		return Consistency{}, err
	}
	return all[0], nil
}

func (a *API) consistency(ctx context.Context, method string, query url.Values) ([]Consistency, error) {
	if query.Get("resource") == "" {
		query.Del("resource")
	}
	r, err := a.Do(ctx, method, consistencyPath, query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	if r.Code != http.StatusOK {
		return nil, fmt.Errorf("%s %s?%s: %w", method, consistencyPath, query.Encode(), r.Err())
	}
	var body struct{ Items []Consistency }
	if err := json.Unmarshal(r.Body, &body); err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, consistencyPath, err)
	}
	return body.Items, nil
}

// Checks returns the number of checks with a status (success, failure or error): those of a
// resource, such as configmaps, or of all if it is "".
func (a *API) Checks(ctx context.Context, resource, status string) (int, error) {
	labels := []string{fmt.Sprintf("status=%q", status)}
	if resource != "" {
		labels = append(labels, fmt.Sprintf("resource=%q", resource))
	}
	n, err := a.Sum(ctx, "apiserver_storage_consistency_checks_total", labels...)
	return int(n), err
}

// RequireConsistent makes one more check, if the server still answers. It returns an error unless
// the server has made checks and none has failed since its start. The environment calls it at its
// end for all servers, except Unchecked ones and those of upstream's engine.
func (s *Server) RequireConsistent() error {
	select {
	case <-s.Done():
		return nil
	default:
	}
	api := s.API()
	if !answers(api) {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), checkTimeout, fmt.Errorf("no answer after %v", checkTimeout))
	defer cancel()
	items, err := api.Consistent(ctx, "")
	if err != nil {
		return fmt.Errorf("the last check of %s: %w", s.URL, err)
	}
	var errs []error
	for _, c := range items {
		if c.Status == "failure" {
			errs = append(errs, fmt.Errorf("%s.%s at %d differs from etcd: %+v", c.Resource, c.Group, c.Revision, c))
		}
	}
	success, err := api.Checks(ctx, "", "success")
	errs = append(errs, err)
	failure, err := api.Checks(ctx, "", "failure")
	errs = append(errs, err)
	if err == nil && (success == 0 || failure != 0) {
		errs = append(errs, fmt.Errorf("%d checks have succeeded and %d failed, want some and none; the last are %+v", success, failure, items))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("consistency of %s: %w", s.URL, err)
	}
	return nil
}

// answers reports whether the server still answers: a test may have killed it, or stopped its etcd.
func answers(api *API) bool {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	r, err := api.Do(ctx, http.MethodGet, "/readyz/etcd", "", nil)
	return err == nil && r.Code == http.StatusOK
}
