package history

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/test/harness"
)

// storyEvents are the events that story causes after its first state.
var storyEvents = []string{"ADDED configmap/a", "ADDED configmap/c", "MODIFIED configmap/a", "MODIFIED configmap/a", "DELETED configmap/a",
	"ADDED configmap/a", "ADDED configmap/b", "DELETED configmap/c"}

func TestReplay_Window_PrintsItsEvents(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("replay")
	states := story(t, ctx, namespace)
	args := []string{"replay", "configmaps", "-n", namespace, "--speed=max", "--since-revision", fmt.Sprint(states[0].revision)}
	table := fields(ok(t, ctx, args...))
	if table[0] != "TIME REVISION EVENT NAMESPACE OBJECT" {
		t.Errorf("header %q", table[0])
	}
	var got []string
	for _, line := range table[1:] {
		cells := strings.Fields(line)
		got = append(got, cells[2]+" "+cells[4])
	}
	if !slices.Equal(got, storyEvents) {
		t.Errorf("events\n%s", strings.Join(got, "\n"))
	}
	lines := strings.Split(strings.TrimSpace(ok(t, ctx, append(args, "-o", "json")...)), "\n")
	if len(lines) != len(storyEvents) {
		t.Fatalf("%d events in JSON", len(lines))
	}
	for i, line := range lines {
		var e struct {
			Type, Revision string
			Object         harness.Object
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Type+" configmap/"+e.Object.Metadata.Name != storyEvents[i] || e.Revision == "" {
			t.Errorf("event %d: %+v, %v", i, e, err)
		}
	}
}

// serve starts a replay server and returns its kubeconfig. It is stopped with SIGINT at the end of
// the test, and has to exit with 0.
func serve(t *testing.T, args ...string) (kubeconfig string) {
	t.Helper()
	binary := harness.Must[string](t)(harness.Binary())
	cmd := exec.Command(binary, append([]string{"history", "--kubeconfig=" + server.Kubeconfig, "replay", "configmaps", "--serve"}, args...)...)
	cmd.Stderr = os.Stderr
	out := harness.Must[io.ReadCloser](t)(cmd.StdoutPipe())
	harness.Check(t, cmd.Start())
	t.Cleanup(func() {
		harness.Check(t, cmd.Process.Signal(syscall.SIGINT))
		if err := cmd.Wait(); err != nil {
			t.Errorf("replay: %v", err)
		}
		if _, err := os.Stat(kubeconfig); !os.IsNotExist(err) {
			t.Errorf("the kubeconfig is still there: %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	harness.Check(t, err)
	return strings.TrimSpace(line)
}

// second returns its second argument.
func second(_ any, err error) error { return err }

// TestReplayServer_StandingStill_IsThePast tests all reads at one revision, and that writes are
// refused.
func TestReplayServer_StandingStill_IsThePast(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("still")
	states := story(t, ctx, namespace)
	past := states[3]
	kubeconfig := serve(t, "--speed=0x", "--since-revision", fmt.Sprint(past.revision))
	config := harness.Must[*rest.Config](t)(clientcmd.BuildConfigFromFlags("", kubeconfig))
	client := kubernetes.NewForConfigOrDie(config)

	list := harness.Must[*corev1.ConfigMapList](t)(client.CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{}))
	if list.ResourceVersion != fmt.Sprint(past.revision) {
		t.Errorf("list at %s, want %d", list.ResourceVersion, past.revision)
	}
	var want corev1.ConfigMapList
	data := harness.Must[[]byte](t)(json.Marshal(map[string]any{"items": past.items}))
	harness.Check(t, json.Unmarshal(data, &want))
	for i := range want.Items {
		want.Items[i].TypeMeta = metav1.TypeMeta{}
	}
	if !reflect.DeepEqual(list.Items, want.Items) {
		t.Errorf("list\n%v\nwant\n%v", list.Items, want.Items)
	}
	one := harness.Must[*corev1.ConfigMap](t)(client.CoreV1().ConfigMaps(namespace).Get(ctx, "a", metav1.GetOptions{}))
	if one.Data["x"] != "2" || one.Data["z"] != "new" {
		t.Errorf("get: %v", one.Data)
	}
	if _, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, "b", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("an object of the future: %v", err)
	}
	for verb, err := range map[string]error{
		"create": second(client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "new"}}, metav1.CreateOptions{})),
		"update": second(client.CoreV1().ConfigMaps(namespace).Update(ctx, one, metav1.UpdateOptions{})),
		"delete": client.CoreV1().ConfigMaps(namespace).Delete(ctx, "a", metav1.DeleteOptions{}),
	} {
		if !apierrors.IsMethodNotSupported(err) || !strings.Contains(err.Error(), "read-only") {
			t.Errorf("%s: %v", verb, err)
		}
	}

	dir := t.TempDir()
	for args, text := range map[string]string{
		"get cm -n " + namespace: "a      3",
		"get cm -A -o name":      "configmap/c",
		"get cm a -o jsonpath={.metadata.labels} -n " + namespace: "",
		"get cm a -n " + namespace:                                "a      3",
		"describe cm a -n " + namespace:                           "new",
	} {
		if out, err := kubectl(t, ctx, dir, kubeconfig, strings.Fields(args)...); err != nil || !strings.Contains(out, text) {
			t.Errorf("kubectl %s: %v\n%s", args, err, out)
		}
	}
	if out, err := kubectl(t, ctx, dir, kubeconfig, "delete", "cm", "a", "-n", namespace); err == nil || !strings.Contains(out, "read-only") {
		t.Errorf("kubectl delete: %v\n%s", err, out)
	}

	stranger := rest.CopyConfig(config)
	stranger.BearerToken = "guessed"
	if _, err := kubernetes.NewForConfigOrDie(stranger).CoreV1().ConfigMaps("").List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a client without the token: %v", err)
	}
}

// TestReplayServer_Informer_SeesTheEvents runs an informer on a replay of the whole window.
func TestReplayServer_Informer_SeesTheEvents(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("informer")
	states := story(t, ctx, namespace)
	// The informer may begin after some of the events, depending on the machine. It never sees
	// other versions than those of the window, and has the final state at the end.
	kubeconfig := serve(t, "--speed=1x", "--since-revision", fmt.Sprint(states[0].revision), "--until-revision", fmt.Sprint(states[len(states)-1].revision))
	config := harness.Must[*rest.Config](t)(clientcmd.BuildConfigFromFlags("", kubeconfig))
	factory := informers.NewSharedInformerFactoryWithOptions(kubernetes.NewForConfigOrDie(config), 0, informers.WithNamespace(namespace))
	informer := factory.Core().V1().ConfigMaps().Informer()
	var mu sync.Mutex
	versions := map[string]bool{} // of all objects that the informer has reported
	seen := func(o any) {
		mu.Lock()
		defer mu.Unlock()
		if m, ok := o.(*corev1.ConfigMap); ok {
			versions[m.Name+"@"+m.ResourceVersion] = true
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: seen, UpdateFunc: func(_, o any) { seen(o) }})
	harness.Check(t, err)
	stopped, stop := context.WithCancel(ctx)
	defer factory.Shutdown()
	defer stop()
	factory.Start(stopped.Done())

	final := states[len(states)-1]
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		var names []string
		for _, o := range informer.GetStore().List() {
			m := o.(*corev1.ConfigMap)
			names = append(names, m.Name+"="+m.Data["x"])
		}
		slices.Sort(names)
		return slices.Equal(names, []string{"a=again", "b=1"}), fmt.Errorf("the informer has %v", names)
	}))
	known := map[string]bool{}
	for _, s := range states {
		for _, item := range s.items {
			metadata := item.(map[string]any)["metadata"].(map[string]any)
			known[fmt.Sprint(metadata["name"], "@", metadata["resourceVersion"])] = true
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for version := range versions {
		if !known[version] {
			t.Errorf("the informer has seen %s, which did not exist until revision %d", version, final.revision)
		}
	}
}
