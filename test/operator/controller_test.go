package operator

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/stratakube/strata/stratatest"
)

// start starts a control plane and a manager with the controller, and returns a client that reads
// from the server.
func start(t *testing.T) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	cfg := stratatest.Start(t, stratatest.WithCRDs("config/crd"))
	skipNameValidation := true // each test has a controller of the same name
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:     scheme,
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: &skipNameValidation},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := (&Reconciler{mgr.GetClient()}).SetupWithManager(mgr); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() { // before the control plane stops
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("manager: %v", err)
		}
	})
	direct, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return direct
}

// eventually fails the test if condition does not become true.
func eventually(t *testing.T, what string, condition func(ctx context.Context) (bool, error)) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, 2*time.Minute, true, condition); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// text returns the text of the greeting "hi", "" if there is none.
func text(ctx context.Context, c client.Client) (string, error) {
	var found corev1.ConfigMap
	err := c.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "hi-text"}, &found)
	return found.Data["text"], client.IgnoreNotFound(err)
}

func greet(t *testing.T, c client.Client, name string) *Greeting {
	t.Helper()
	greeting := &Greeting{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "hi"}, Spec: GreetingSpec{Name: name}}
	if err := c.Create(t.Context(), greeting); err != nil {
		t.Fatal(err)
	}
	eventually(t, "text of a new greeting", func(ctx context.Context) (bool, error) {
		got, err := text(ctx, c)
		return got == "Hello, "+name+"!", err
	})
	return greeting
}

func TestReconciler_NewGreeting_HasTextAndStatus(t *testing.T) {
	t.Parallel()
	c := start(t)
	greeting := greet(t, c, "world")
	eventually(t, "status", func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, client.ObjectKeyFromObject(greeting), greeting)
		return greeting.Status.ConfigMap == "hi-text", err
	})
}

func TestReconciler_ChangedGreeting_ChangesText(t *testing.T) {
	t.Parallel()
	c := start(t)
	greeting := greet(t, c, "old")
	if err := c.Patch(t.Context(), greeting, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"name":"new"}}`))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "changed text", func(ctx context.Context) (bool, error) {
		got, err := text(ctx, c)
		return got == "Hello, new!", err
	})
}

func TestReconciler_DeletedText_IsWrittenAgain(t *testing.T) {
	t.Parallel()
	c := start(t)
	greet(t, c, "world")
	if err := c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "hi-text"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "text after its deletion", func(ctx context.Context) (bool, error) {
		got, err := text(ctx, c)
		return got == "Hello, world!", err
	})
}

func TestGreeting_WithoutName_IsInvalid(t *testing.T) {
	t.Parallel()
	err := start(t).Create(t.Context(), &Greeting{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "nameless"}})
	if !apierrors.IsInvalid(err) {
		t.Errorf("creation of a greeting without a name: %v, want Invalid", err)
	}
}
