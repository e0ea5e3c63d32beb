package version_test // not package version: its imports would then be initialised before the stamp

import (
	"os"
	"regexp"
	"strings"
	"testing"

	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/client-go/rest"
	basecompatibility "k8s.io/component-base/compatibility"
	componentversion "k8s.io/component-base/version"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/version"
)

// A test binary is an unstamped build, so it reports the same version as `go build` without flags.
func TestKubernetesVersion_HasStrataSuffix(t *testing.T) {
	own := version.Get()
	got := componentversion.Get()
	if want := own.Kubernetes + "+strata." + strings.TrimPrefix(own.Strata, "v"); got.GitVersion != want {
		t.Errorf("git version = %q, want %q", got.GitVersion, want)
	}
	parsed, err := utilversion.ParseSemantic(got.GitVersion)
	if err != nil {
		t.Fatalf("not a semantic version: %v", err)
	}
	if c, err := parsed.Compare(own.Kubernetes); err != nil || c != 0 {
		t.Errorf("compares as %d to %s (err %v), want equal", c, own.Kubernetes, err)
	}
	if mm := "v" + got.Major + "." + got.Minor + "."; !strings.HasPrefix(got.GitVersion, mm) {
		t.Errorf("major and minor are %q and %q in %q", got.Major, got.Minor, got.GitVersion)
	}
	if strings.Contains(got.GitCommit, "$") {
		t.Errorf("commit is the placeholder %q", got.GitCommit)
	}
}

// The effective version is computed during package initialisation, so it shows whether the stamp
// was set early enough.
func TestVersionStamp_IsSetBeforePackageInit(t *testing.T) {
	effective := compatibility.DefaultComponentGlobalsRegistry.EffectiveVersionFor(basecompatibility.DefaultKubeComponent)
	if got := "v" + effective.BinaryVersion().String(); got != version.GitVersion() {
		t.Errorf("binary version = %q, want %q", got, version.GitVersion())
	}
}

func TestUserAgent_ContainsKubernetesRelease(t *testing.T) {
	if ua, want := rest.DefaultKubernetesUserAgent(), "/"+version.Get().Kubernetes; !strings.Contains(ua, want) {
		t.Errorf("user agent %q does not contain %q", ua, want)
	}
}

func TestKubernetesVersion_MatchesGoMod(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	testcheck.NoError(t, err)
	m := regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v\S+)`).FindSubmatch(mod)
	if m == nil {
		t.Fatal("go.mod does not require k8s.io/kubernetes")
	}
	if got := string(m[1]); got != version.Get().Kubernetes {
		t.Errorf("go.mod requires k8s.io/kubernetes %s, this package has %s", got, version.Get().Kubernetes)
	}
}

func TestSupportedLibraries_MatchGoMod(t *testing.T) {
	minor := func(path string) string {
		mod, err := os.ReadFile(path)
		testcheck.NoError(t, err)
		m := regexp.MustCompile(`(?m)^\s*k8s\.io/apiserver (v\d+\.\d+)\.`).FindSubmatch(mod)
		if m == nil {
			t.Fatalf("%s does not require k8s.io/apiserver", path)
		}
		return string(m[1])
	}
	want := minor("../../../kube/go.mod") + " and " + minor("../../go.mod")
	if got := version.Get().Libraries; got != want {
		t.Errorf("the go.mod files require %s, this package has %s", want, got)
	}
}
