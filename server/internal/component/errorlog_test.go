package component

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

func TestErrorLogger_WritesErrorsAndVerboseMessages(t *testing.T) {
	flags := flag.NewFlagSet("", flag.PanicOnError)
	klog.InitFlags(flags)
	set := func(name, value string) {
		if err := flags.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	set("logtostderr", "false")
	var out bytes.Buffer
	klog.SetOutput(&out)
	t.Cleanup(func() { klog.SetOutput(nil); set("logtostderr", "true"); set("v", "0") })

	logAll := func() string {
		out.Reset()
		logger := ErrorLogger().WithName("part").WithValues("key", "value")
		logger.Info("message")
		logger.V(2).Info("detail")
		logger.Error(errors.New("cause"), "failure")
		klog.Flush()
		return out.String()
	}
	quiet := logAll()
	if strings.Contains(quiet, "message") || strings.Contains(quiet, "detail") {
		t.Errorf("without verbosity: %s", quiet)
	}
	for _, want := range []string{"failure", `err="cause"`, `key="value"`, "errorlog_test.go"} {
		if !strings.Contains(quiet, want) {
			t.Errorf("%q is not in %s", want, quiet)
		}
	}
	set("v", "2")
	if verbose := logAll(); !strings.Contains(verbose, "message") || !strings.Contains(verbose, "detail") {
		t.Errorf("with verbosity 2: %s", verbose)
	}
}
