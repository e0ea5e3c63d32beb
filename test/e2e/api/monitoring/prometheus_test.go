package monitoring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// promtool runs promtool in deploy/monitoring.
func promtool(t *testing.T, stdin []byte, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(harness.Context(t, testTimeout), harness.Prometheus(t, "promtool"), args...)
	cmd.Dir, cmd.Stdin = files, bytes.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func TestPromtool_RulesAreValid(t *testing.T) { promtool(t, nil, "check", "rules", "rules.yaml") }

func TestPromtool_UnitTestsOfRulesPass(t *testing.T) {
	promtool(t, nil, "test", "rules", "rules_test.yaml")
}

// TestPromtool_MetricsPassLint checks the metrics of Strata for names, units and help texts; the
// names of others are upstream's.
func TestPromtool_MetricsPassLint(t *testing.T) {
	_, text := scrape(t)
	var own []byte
	for line := range bytes.Lines(text) {
		if regexp.MustCompile(`^(# (HELP|TYPE) )?strata_`).Match(line) {
			own = append(own, line...)
		}
	}
	if n := bytes.Count(own, []byte("# TYPE ")); n < 50 {
		t.Errorf("only %d metrics", n)
	}
	promtool(t, own, "check", "metrics")
}

// TestPrometheus_ScrapesServer_EvaluatesRulesAndDashboard: a Prometheus that scrapes the server
// evaluates every rule without an error, and every query of the dashboard; queries of a state that
// every server has return a result.
func TestPrometheus_ScrapesServer_EvaluatesRulesAndDashboard(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	base := startPrometheus(t)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		var found struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
		if err := query(ctx, base+"/api/v1/rules", &found); err != nil {
			return false, err
		}
		evaluated := 0
		for _, group := range found.Groups {
			for _, r := range group.Rules {
				if r.Health != "ok" {
					return false, fmt.Errorf("%s: %s: %s", r.Name, r.Health, r.LastError)
				}
				evaluated++
			}
		}
		if want := len(readRules(t).all()); evaluated != want {
			return false, fmt.Errorf("%d rules, want %d", evaluated, want)
		}
		return true, nil
	}))
	for where, expr := range readDashboard(t).expressions() {
		stored := !strings.Contains(expr, "rate(") && !strings.Contains(expr, "increase(") && !strings.Contains(expr, "instance:")
		// an open watch, a compaction
		event := strings.Contains(expr, "strata_watch_lag_events") || strings.Contains(expr, "strata_compaction_kept_revisions")
		// The samples of a target are stale while its last scrape failed, as on a busy machine.
		err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			var result struct{ Result []json.RawMessage }
			if err := query(ctx, base+"/api/v1/query?query="+url.QueryEscape(expr), &result); err != nil {
				return false, err
			}
			return !stored || event || len(result.Result) > 0, errors.New("no result")
		})
		if err != nil {
			t.Errorf("%s: %s: %v", where, expr, err)
		}
	}
}

// startPrometheus starts a Prometheus with rules.yaml that scrapes the server, and returns its URL
// when a scrape has succeeded.
func startPrometheus(t *testing.T) string {
	t.Helper()
	ctx := harness.Context(t, testTimeout)
	program := harness.Prometheus(t, "prometheus")
	rules, err := filepath.Abs(files + "rules.yaml")
	harness.Check(t, err)
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	harness.Check(t, os.WriteFile(config, fmt.Appendf(nil, `global: {scrape_interval: 5s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
- job_name: apiserver
  scheme: https
  authorization: {credentials: %q}
  tls_config: {ca_file: %q}
  static_configs: [{targets: [%q]}]
`, rules, server.Config.BearerToken, server.CAFile, strings.TrimPrefix(server.URL, "https://")), 0o600))
	e := harness.New(t)
	base := e.FreeURL()
	p := e.StartProgram("prometheus", program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+strings.TrimPrefix(base, "http://"))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		if err := p.Ended(); err != nil {
			t.Fatal(err)
		}
		var found struct {
			ActiveTargets []struct{ Health, LastError string }
		}
		if err := query(ctx, base+"/api/v1/targets", &found); err != nil || len(found.ActiveTargets) == 0 {
			return false, err
		}
		target := found.ActiveTargets[0]
		return target.Health == "up", fmt.Errorf("target is %s: %s", target.Health, target.LastError)
	}))
	return base
}

// query reads the data of an answer of Prometheus' API.
func query(ctx context.Context, target string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	answer := struct {
		Status, Error string
		Data          any
	}{Data: into}
	if err := json.Unmarshal(body, &answer); err != nil {
		return fmt.Errorf("%s: %w", resp.Status, err)
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", resp.Status, answer.Error)
	}
	return nil
}
