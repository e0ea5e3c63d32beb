package controllers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// failing returns its errors one after the other, then configurations.
type failing struct {
	errs  []error
	calls int
}

func (f *failing) Config(string) (*rest.Config, error) {
	f.calls++
	if len(f.errs) == 0 {
		return &rest.Config{}, nil
	}
	err := f.errs[0]
	f.errs = f.errs[1:]
	return nil, err
}

// forever returns err as often as Config asks.
func forever(err error) []error {
	return slices.Repeat([]error{err}, int(configPatience/configPause)+2)
}

// TestClients_ServerEnds_RequestIsRepeated: a server that ends while the controllers start must not
// end them; a refusal must.
func TestClients_ServerEnds_RequestIsRepeated(t *testing.T) {
	broken := &url.Error{Op: "Post", URL: "https://127.0.0.1:1/api", Err: io.ErrUnexpectedEOF}
	unavailable := apierrors.NewServiceUnavailable("starting")
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "serviceaccounts"}, "x", nil)
	another := errors.New("another")
	// as client-go wraps it
	inBody := func(err error) error { return fmt.Errorf("read the response: %w", err) }
	for name, c := range map[string]struct {
		errs  []error
		calls int // 0: several
		want  error
	}{
		"none":             {nil, 1, nil},
		"broken":           {[]error{broken, unavailable}, 3, nil},
		"body broken":      {[]error{inBody(io.ErrUnexpectedEOF)}, 2, nil},
		"stream broken":    {[]error{inBody(http2.StreamError{Code: http2.ErrCodeInternal})}, 2, nil},
		"connection ended": {[]error{inBody(errors.New("http2: server sent GOAWAY and closed the connection"))}, 2, nil},
		"connection reset": {[]error{inBody(syscall.ECONNRESET)}, 2, nil},
		"timeout":          {[]error{apierrors.NewTimeoutError("slow", 1)}, 2, nil},
		"forbidden":        {[]error{broken, forbidden}, 2, forbidden},
		"always":           {forever(broken), 0, broken},
		"another reason":   {[]error{another}, 1, another},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				builder := &failing{errs: c.errs}
				config, err := clients{t.Context(), builder}.Config("x")
				if !errors.Is(err, c.want) || (err == nil) != (config != nil) {
					t.Errorf("configuration %v, error %v, want error %v", config, err, c.want)
				}
				if c.calls > 0 && builder.calls != c.calls {
					t.Errorf("%d calls, want %d", builder.calls, c.calls)
				}
			})
		})
	}
}

// TestClients_Stopped_NoRequestIsRepeated: controllers that are stopped while they are built do not
// wait for a server, and do not end the process.
func TestClients_Stopped_NoRequestIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := &url.Error{Op: "Post", URL: "https://127.0.0.1:1/api", Err: syscall.ECONNREFUSED}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		c := clients{ctx, &failing{errs: forever(broken)}}
		began := time.Now()
		if _, err := c.Config("x"); !errors.Is(err, broken) || time.Since(began) != time.Second {
			t.Errorf("error %v after %s, want %v after 1s", err, time.Since(began), broken)
		}
		_, err := c.ClientOrDie("x").CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
		if !errors.Is(err, broken) {
			t.Errorf("list: %v, want %v", err, broken)
		}
		if _, err := c.DiscoveryClientOrDie("x").ServerVersion(); !errors.Is(err, broken) {
			t.Errorf("discovery: %v, want %v", err, broken)
		}
	})
}
