package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// checkInterval is the interval of the server's comparisons with etcd: short enough that some run
// during each of the tests.
const checkInterval = "5s"

// checks are flags with which a server of the engine periodically compares its memory with etcd. A
// difference ends it, by the environment that it inherits.
func (o options) checks() ([]string, error) {
	if o.engine != "strata" {
		return nil, nil
	}
	return []string{"--strata-consistency-check-interval=" + checkInterval}, os.Setenv("KUBE_WATCHCACHE_CONSISTENCY_CHECKER", "true")
}

// requireConsistent makes the server compare all resources once more, and returns the number of
// resources without a difference.
func (c *cluster) requireConsistent(ctx context.Context) (resources int, err error) {
	body, err := c.client.CoreV1().RESTClient().Post().AbsPath("/debug/strata/consistency").Do(ctx).Raw()
	if err != nil {
		return 0, fmt.Errorf("compare memory with etcd: %w", err)
	}
	var checks struct {
		Items []struct{ Group, Resource, Status, Error string }
	}
	if err := json.Unmarshal(body, &checks); err != nil {
		return 0, fmt.Errorf("compare memory with etcd: %w", err)
	}
	var errs []error
	for _, check := range checks.Items {
		switch check.Status {
		// an error is no result: the check was overtaken by a compaction, or the resource is
		// gone
		case "success":
			resources++
		case "failure":
			errs = append(errs, fmt.Errorf("memory differs from etcd: %s.%s", check.Resource, check.Group))
		}
	}
	if resources == 0 {
		errs = append(errs, fmt.Errorf("compare memory with etcd: no check has succeeded: %s", body))
	}
	return resources, errors.Join(errs...)
}
