package kubestorage

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// The suites that upstream exports for implementations of storage.Interface. Each runs on a
// separate storage and etcd. docs/keps.md lists the suites that cannot run on the engine, and the
// reasons.

// suite runs an exported suite as a subtest; a skip is a failure, except with -short.
func suite(t *testing.T, name string, run func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(sub *testing.T) {
		sub.Cleanup(func() {
			if sub.Skipped() && !testing.Short() {
				t.Errorf("%s was skipped", name)
			}
		})
		run(sub)
	})
}

// parallelSuite is suite for one that sets no gate: it runs in parallel with the others of t, most
// of which wait. Gates that t has set stay set until the suites of t have ended.
func parallelSuite(t *testing.T, name string, run func(t *testing.T)) {
	t.Helper()
	suite(t, name, func(t *testing.T) {
		t.Parallel()
		run(t)
	})
}

// cacherSuites are the suites of upstream's cacher that take a storage and no other argument.
var cacherSuites = []struct {
	name string
	run  func(context.Context, *testing.T, storage.Interface)
	wrap func(*Store) storage.Interface // gives a suite time; nil: not
}{
	{"CreateWithTTL", storagetesting.RunTestCreateWithTTL, nil},
	{"CreateWithKeyExist", storagetesting.RunTestCreateWithKeyExist, nil},
	{"UnconditionalDelete", storagetesting.RunTestUnconditionalDelete, nil},
	{"ConditionalDelete", storagetesting.RunTestConditionalDelete, nil},
	{"DeleteWithSuggestion", storagetesting.RunTestDeleteWithSuggestion, nil},
	{"DeleteWithSuggestionAndConflict", storagetesting.RunTestDeleteWithSuggestionAndConflict, nil},
	{"DeleteWithConflict", storagetesting.RunTestDeleteWithConflict, nil},
	{"DeleteWithSuggestionOfDeletedObject", storagetesting.RunTestDeleteWithSuggestionOfDeletedObject, nil},
	{"ValidateDeletionWithSuggestion", storagetesting.RunTestValidateDeletionWithSuggestion, nil},
	{"ValidateDeletionWithOnlySuggestionValid", storagetesting.RunTestValidateDeletionWithOnlySuggestionValid, nil},
	{"PreconditionalDeleteWithSuggestion", storagetesting.RunTestPreconditionalDeleteWithSuggestion, nil},
	{"PreconditionalDeleteWithOnlySuggestionPass", storagetesting.RunTestPreconditionalDeleteWithOnlySuggestionPass, nil},
	{"ListPaging", storagetesting.RunTestListPaging, nil},
	{"GetListRecursivePrefix", storagetesting.RunTestGetListRecursivePrefix, nil},
	{"NamespaceScopedList", storagetesting.RunTestNamespaceScopedList, nil},
	{"GuaranteedUpdateWithTTL", storagetesting.RunTestGuaranteedUpdateWithTTL, nil},
	{"GuaranteedUpdateWithConflict", storagetesting.RunTestGuaranteedUpdateWithConflict, nil},
	{"GuaranteedUpdateWithSuggestionAndConflict", storagetesting.RunTestGuaranteedUpdateWithSuggestionAndConflict, nil},
	{"KeySchema", storagetesting.RunTestKeySchema, nil},
	{"Watch", storagetesting.RunTestWatch, nil},
	{"DeleteTriggerWatch", storagetesting.RunTestDeleteTriggerWatch, nil},
	{"WatchFromNonZero", storagetesting.RunTestWatchFromNonZero, nil},
	{"DelayedWatchDelivery", storagetesting.RunTestDelayedWatchDelivery, func(s *Store) storage.Interface { return writeAndSee{s} }},
	{"WatchDeleteEventObjectHaveLatestRV", storagetesting.RunTestWatchDeleteEventObjectHaveLatestRV, nil},
	{"WatchInitializationSignal", storagetesting.RunTestWatchInitializationSignal, func(s *Store) storage.Interface { return lasting{unhurried{s}} }},
	{"ClusterScopedWatch", storagetesting.RunTestClusterScopedWatch, nil},
	{"NamespaceScopedWatch", storagetesting.RunTestNamespaceScopedWatch, nil},
	{"SendInitialEventsBackwardCompatibility", storagetesting.RunSendInitialEventsBackwardCompatibility, nil},
}

// readYourWritesSuites read objects that they have created, without waiting for them.
var readYourWritesSuites = []struct {
	name string
	run  func(context.Context, *testing.T, storage.Interface)
}{
	{"WatchSemantics", storagetesting.RunWatchSemantics},
	{"WatchSemanticInitialEventsExtended", storagetesting.RunWatchSemanticInitialEventsExtended},
	{"WatchListMatchSingle", storagetesting.RunWatchListMatchSingle},
}

// pagingSuites validate the reads of etcd that their lists have caused.
var pagingSuites = []struct {
	name string
	run  func(context.Context, *testing.T, storage.Interface, storagetesting.CallsValidation)
}{
	{"ListContinuation", storagetesting.RunTestListContinuation},
	{"ListPaginationRareObject", storagetesting.RunTestListPaginationRareObject},
	{"ListContinuationWithFilter", storagetesting.RunTestListContinuationWithFilter},
}

// TestStorageSuites runs the suites that upstream's cacher runs, on the engine.
func TestStorageSuites(t *testing.T) {
	for _, s := range cacherSuites {
		parallelSuite(t, s.name, func(t *testing.T) {
			f := setup(t)
			var tested storage.Interface = f.engine(t)
			if s.wrap != nil {
				tested = s.wrap(f.engine(t))
			}
			s.run(contextFor(t), t, repeating{tested})
		})
	}
	for _, s := range readYourWritesSuites {
		suite(t, s.name, func(t *testing.T) {
			f := setup(t)
			s.run(contextFor(t), t, repeating{writeAndDeliver{writeAndSee{f.engine(t)}, new(sync.Map)}})
		})
	}

	parallelSuite(t, "WatcherTimeout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			storagetesting.RunTestWatcherTimeout(contextFor(t), t, setupInMemory(t).engine(t))
		})
	})
	parallelSuite(t, "Get", func(t *testing.T) {
		f := setup(t, atRoot)
		storagetesting.RunTestGet(contextFor(t), t, invalidVersions(longLived{writeAndSee{f.engine(t)}}))
	})
	parallelSuite(t, "Create", func(t *testing.T) {
		f := setup(t)
		storagetesting.RunTestCreate(contextFor(t), t, repeating{f.engine(t)}, f.checkStored(""))
	})
	parallelSuite(t, "OptionalWatchBookmarksWithCorrectResourceVersion", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := setupInMemory(t)
			storagetesting.RunTestOptionalWatchBookmarksWithCorrectResourceVersion(contextFor(t), t, unhurried{f.engine(t)})
		})
	})
	parallelSuite(t, "WatchDispatchBookmarkEvents", func(t *testing.T) {
		f := setup(t)
		storagetesting.RunTestWatchDispatchBookmarkEvents(contextFor(t), t, bookmarked{lasting{unhurried{f.engine(t)}}, new(watch.Interface)}, true)
	})
	parallelSuite(t, "WatchFromZero", func(t *testing.T) {
		f := setup(t, withWindow(mirror.Window{MaxAge: time.Hour, MaxBytes: 1 << 20}))
		storagetesting.RunTestWatchFromZero(contextFor(t), t, repeating{f.engine(t)}, f.outrun)
	})
	parallelSuite(t, "CompactRevision", func(t *testing.T) {
		f := setup(t)
		storagetesting.RunTestCompactRevision(contextFor(t), t, repeating{f.engine(t)}, f.increaseRV, f.compact)
	})
	for _, sizes := range []bool{true, false} {
		suite(t, fmt.Sprintf("Stats/SizeBasedListCostEstimate=%t", sizes), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.SizeBasedListCostEstimate, sizes)
			f := setup(t)
			storagetesting.RunTestStats(contextFor(t), t, repeating{f.engine(t)}, testCodec(), identity.NewEncryptCheckTransformer(), sizes)
		})
	}

	// Pages after the first are answered from memory too.
	for _, s := range pagingSuites {
		parallelSuite(t, s.name, func(t *testing.T) {
			f := setup(t)
			validated := 0
			s.run(contextFor(t), t, repeating{f.engine(t)}, func(t *testing.T, _, _ uint64) {
				validated++
				if got := f.requests.tally(); got.Gets != 0 || got.Ranges != 0 {
					t.Errorf("etcd was read: %+v", got)
				}
			})
			if validated == 0 {
				t.Error("the suite validated no reads from etcd")
			}
		})
	}
}

// TestListSuites runs the suites of LIST with the gates that decide whether memory or etcd answers.
// Upstream's gates of the same names set the suite's expectations, as long as upstream has them:
// since v0.37 its consistent lists are always from memory.
func TestListSuites(t *testing.T) {
	const consistentLists = featuregate.Feature("ConsistentListFromCache")
	_, optional := utilfeature.DefaultFeatureGate.DeepCopy().GetAll()[consistentLists]
	for _, past := range []bool{true, false} {
		t.Run(fmt.Sprintf("ListFromCacheSnapshot=%t", past), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ListFromCacheSnapshot, past)
			for _, consistent := range []bool{true, false} {
				t.Run(fmt.Sprintf("ConsistentListFromCache=%t", consistent), func(t *testing.T) {
					switch {
					case !optional:
						t.Parallel() // both have the same gates of upstream
					case !consistent:
						featuregatetesting.SetFeatureGateEmulationVersionDuringTest(t, utilfeature.DefaultFeatureGate, version.MustParse("1.33"))
						featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, consistentLists, false)
					}
					gates := featuregate.NewFeatureGate()
					if err := errors.Join(gates.Add(Gates()), gates.SetFromMap(map[string]bool{
						string(ConsistentListFromCache): consistent,
						string(ListFromCacheSnapshot):   past,
					})); err != nil {
						t.Fatal(err)
					}
					opts := []func(*options){withGates(gates)}
					if !consistent {
						// No list may need the gated feature; as in upstream's cacher, only
						// events move memory's revision.
						opts = append(opts, withSource(func(s driver.Source) driver.Source { return withoutProgress{s} }))
					}
					if consistent || optional {
						parallelSuite(t, "List", func(t *testing.T) {
							f := setup(t, opts...)
							storagetesting.RunTestList(contextFor(t), t, repeating{writeAndSee{f.engine(t)}}, f.compact, true, f.lists)
						})
					}
					parallelSuite(t, "ConsistentList", func(t *testing.T) {
						open, own := new(atomic.Int32), opts
						if consistent {
							own = append(slices.Clone(opts), withSource(func(s driver.Source) driver.Source { return progressWhile{s, open} }))
						}
						f := setup(t, own...)
						storagetesting.RunTestConsistentList(contextFor(t), t, consistently{repeating{f.engine(t)}, open, past}, f.increaseRV, true, consistent, past)
					})
					parallelSuite(t, "GetListNonRecursive", func(t *testing.T) {
						f := setup(t, opts...)
						storagetesting.RunTestGetListNonRecursive(contextFor(t), t, f.increaseRV, repeating{f.engine(t)})
					})
				})
			}
		})
	}
}

// TestStorageSuitesBeyondCacher runs the suites that upstream's cacher does not.
func TestStorageSuitesBeyondCacher(t *testing.T) {
	parallelSuite(t, "WatchContextCancel", func(t *testing.T) {
		storagetesting.RunTestWatchContextCancel(contextFor(t), t, setup(t).engine(t))
	})
	parallelSuite(t, "ProgressNotify", func(t *testing.T) {
		f := setup(t, func(o *options) {
			o.etcd.ProgressInterval = time.Second
		})
		storagetesting.RunOptionalTestProgressNotify(contextFor(t), t, repeating{f.engine(t)}, f.increaseRV)
	})

	// The suites replace the transformer during the run: for a while, or for some keys.
	withPrefix := []struct {
		name string
		run  func(context.Context, *testing.T, *fixture, storagetesting.InterfaceWithPrefixTransformer)
	}{
		{"GuaranteedUpdate", func(ctx context.Context, t *testing.T, f *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunTestGuaranteedUpdate(ctx, t, s, f.checkStored(suitePrefix))
		}},
		{"GuaranteedUpdateChecksStoredData", func(ctx context.Context, t *testing.T, _ *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunTestGuaranteedUpdateChecksStoredData(ctx, t, s)
		}},
		{"ListResourceVersionMatch", func(ctx context.Context, t *testing.T, _ *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunTestListResourceVersionMatch(ctx, t, s)
		}},
		{"TransformationFailure", func(ctx context.Context, t *testing.T, _ *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunTestTransformationFailure(ctx, t, s)
		}},
		{"WatchError", func(ctx context.Context, t *testing.T, _ *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunTestWatchError(ctx, t, s)
		}},
		{"WatchErrorIsBlockingFurtherEvents", func(ctx context.Context, t *testing.T, _ *fixture, s storagetesting.InterfaceWithPrefixTransformer) {
			storagetesting.RunWatchErrorIsBlockingFurtherEvents(ctx, t, s)
		}},
	}
	for _, s := range withPrefix {
		suite(t, s.name, func(t *testing.T) {
			// The suites expect the errors without the gate, which is on by default since v0.37.
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, false)
			swap := newSwappable(storagetesting.NewPrefixTransformer([]byte(suitePrefix), false))
			f := setup(t, withTransformer(swap))
			f.engine(t).watches.RetryFor = time.Second
			s.run(contextFor(t), t, f, prefixStore{repeating{f.engine(t)}, swap})
		})
	}
}

// TestStorageSuitesFromEtcd runs, on the adapter without a mirror, the suites that contradict a
// KEP: resource version 0 ignores the limit (KEP-2340, row L6), so a list at 0 with a limit has no
// continue token with which the suite could continue.
func TestStorageSuitesFromEtcd(t *testing.T) {
	parallelSuite(t, "ListInconsistentContinuation", func(t *testing.T) {
		f := setup(t, fromEtcd)
		storagetesting.RunTestListInconsistentContinuation(contextFor(t), t, f, f.compact)
	})
	parallelSuite(t, "List", func(t *testing.T) {
		// including the two cases that it skips for caches
		f := setup(t, fromEtcd)
		storagetesting.RunTestList(contextFor(t), t, f, f.compact, false, f.lists)
	})
}

// TestRecordersRecord shows that the suites' recorders work: a list from etcd is recorded, one from
// memory is not.
func TestRecordersRecord(t *testing.T) {
	for _, c := range []struct {
		name  string
		opts  []func(*options)
		lists int
		want  tally
	}{
		{"from etcd", []func(*options){fromEtcd}, 1, tally{Ranges: 1}},
		{"uncached", []func(*options){uncached}, 1, tally{Ranges: 1}},
		{"from memory", nil, 0, tally{Revisions: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := setup(t, c.opts...)
			f.create(t, newPod("a"))
			f.catchUp(t)
			// The feed may start only now, with a read; the next write arrives through it.
			f.update(t, newPod("a"), "x")
			f.catchUp(t)
			f.reads.GetReadsAndReset()
			ctx := context.WithValue(contextFor(t), storagetesting.RecorderContextKey, t.Name())
			got := f.requests.during(func() {
				list := &example.PodList{}
				if err := getList(ctx, f, "/pods/", everything(), list); err != nil || len(list.Items) != 1 {
					t.Fatalf("%d pods, %v", len(list.Items), err)
				}
			})
			own := got
			own.Revisions = min(got.Revisions, c.want.Revisions) // that of an idle etcd
			if own != c.want {
				t.Errorf("requests to etcd: %+v, want %+v", got, c.want)
			}
			reads := f.reads.GetReadsAndReset()
			if r, ok := any(f.reads).(interface{ GetStreamReadsAndReset() uint64 }); ok {
				// since v0.37
				reads += r.GetStreamReadsAndReset()
			}
			if reads < uint64(got.Revisions+got.Gets+got.Ranges) {
				t.Errorf("upstream's recorder saw %d reads, want at least those of %+v", reads, got)
			}
			if n := len(f.lists.ListRequestForKey(t.Name())); n != c.lists {
				t.Errorf("upstream's recorder saw %d lists, want %d", n, c.lists)
			}
		})
	}
}

// notForTheEngine are cases of suites in which a transformer reports an error that does not mean a
// corrupt object. In a server every error of a transformer means that: the storage wraps them all
// (etcd3.WithCorruptObjErrorHandlingTransformer). docs/keps.md lists them.
const notForTheEngine = "/GetListWithErrorAggregation/(first_error_is_an_unexpected_error|feature_enabled,_aggregation_should_abort_as_soon)"

// minorSuitesEnv is the environment variable with which TestSuitesOfThisMinor runs TestMinorSuites.
const minorSuitesEnv = "STRATA_TEST_MINOR_SUITES"

// onlyInItsProcess skips a test that needs the flags of TestSuitesOfThisMinor.
func onlyInItsProcess(t *testing.T) {
	t.Helper()
	if os.Getenv(minorSuitesEnv) != "1" {
		t.Skip("TestSuitesOfThisMinor runs it, in a process without the cases of notForTheEngine")
	}
}

// TestSuitesOfThisMinor runs TestMinorSuites and BenchmarkMinorSuites: the suites that only some
// supported minors of k8s.io/apiserver export, or in different forms. Their files have a build tag
// per minor. A test program that was built with the tag, as make test does, runs itself; otherwise
// go test builds it, which takes minutes under the race detector.
func TestSuitesOfThisMinor(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	t.Parallel()
	_, minor := upstreamSuites(t)
	info, ok := debug.ReadBuildInfo()
	if !ok {
		t.Fatal("no build info")
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	args := []string{"-test.count=1", "-test.v", "-test.timeout=5m", "-test.run=^TestMinorSuites$", "-test.skip=" + notForTheEngine}
	benchmarks := !testrace.Few() // minutes under the race detector
	if benchmarks {
		args = append(args, "-test.bench=^BenchmarkMinorSuites$", "-test.benchtime=1x")
		if os.Getenv("STRATA_TEST_LONG") != "1" {
			args = append(args, "-suites.percent=1") // runs, measures nothing
		}
	}
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	if !slices.Contains(strings.Split(settings["-tags"], ","), minorTag(minor)) {
		// Without vet, which would analyse all dependencies again; make vet runs with the tag.
		build := []string{"test", "-tags=" + minorTag(minor), "-vet=off", "-race=" + cmp.Or(settings["-race"], "false"), "."}
		cmd = exec.CommandContext(ctx, "go", append(build, args...)...)
	}
	cmd.Env = append(os.Environ(), minorSuitesEnv+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestMinorSuites (")) || benchmarks && !bytes.Contains(out, []byte("\nBenchmarkMinorSuites/")) {
		t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	t.Logf("%s", out)
}

// TestEverySuiteIsCalled fails if upstream exports a suite that the tests and benchmarks of this
// package do not call, or if a suite adds a skip that is not listed here.
func TestEverySuiteIsCalled(t *testing.T) {
	dir, minor := upstreamSuites(t)
	exported := map[string]bool{}
	skips := map[string]int{}
	for _, file := range parseDir(t, dir, "*.go") {
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv != nil {
				continue
			}
			if f.Name.IsExported() && strings.HasPrefix(f.Name.Name, "Run") {
				exported[f.Name.Name] = true
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok && strings.HasPrefix(s.Sel.Name, "Skip") {
					skips[f.Name.Name]++
				}
				return true
			})
		}
	}
	called := map[string]bool{}
	for _, file := range parseDir(t, ".", "*_test.go") {
		if !builtWith(t, file, minorTag(minor)) {
			continue
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if pkg, ok := s.X.(*ast.Ident); ok && pkg.Name == "storagetesting" {
					called[s.Sel.Name] = true
				}
			}
			return true
		})
	}
	type counts struct{ tests, benchmarks int }
	var got counts
	for name := range exported {
		if strings.HasPrefix(name, "RunBenchmark") {
			got.benchmarks++
		} else {
			got.tests++
		}
		if !called[name] {
			t.Errorf("%s is not called", name)
		}
	}
	// The numbers in docs/keps.md.
	if want := map[string]counts{"v0.36": {55, 3}, "v0.37": {60, 3}, "v0.38": {60, 3}}[minor]; got != want {
		t.Errorf("k8s.io/apiserver %s exports %+v, want %+v", minor, got, want)
	}
	// RunTestList skips two cases for caches, which TestStorageSuitesFromEtcd runs;
	// RunTestWatchFromZero skips its end without a function that compacts.
	for name, n := range skips {
		if want := map[string]int{"RunTestList": 1, "RunTestWatchFromZero": 1}[name]; n != want {
			t.Errorf("%s can skip in %d places, want %d", name, n, want)
		}
	}
}

// upstreamSuites returns the directory of the suites that this build calls, and the minor version
// of their module, such as v0.37.
func upstreamSuites(t *testing.T) (dir, minor string) {
	t.Helper()
	out, err := exec.CommandContext(contextFor(t), "go", "list", "-f", "{{.Dir}} {{.Module.Version}}", "k8s.io/apiserver/pkg/storage/testing").Output()
	if err != nil {
		t.Fatalf("find upstream's suites: %v", err)
	}
	dir, version, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	if parts := strings.Split(version, "."); len(parts) >= 3 {
		return dir, parts[0] + "." + parts[1]
	}
	t.Fatalf("k8s.io/apiserver has version %q", version)
	return "", ""
}

// minorTag is the build tag of the files of one minor.
func minorTag(minor string) string { return "apiserver_" + strings.ReplaceAll(minor, ".", "_") }

// builtWith reports whether a build with the tag includes the file.
func builtWith(t *testing.T, file *ast.File, tag string) bool {
	for _, group := range file.Comments {
		for _, c := range group.List {
			if c.Pos() > file.Package || !constraint.IsGoBuild(c.Text) {
				continue
			}
			expr, err := constraint.Parse(c.Text)
			testcheck.NoError(t, err)
			return expr.Eval(func(name string) bool { return name == tag })
		}
	}
	return true
}

// parseDir parses the files of a directory that match the pattern.
func parseDir(t *testing.T, dir, pattern string) []*ast.File {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no %s in %s: %v", pattern, dir, err)
	}
	slices.Sort(paths)
	var files []*ast.File
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution|parser.ParseComments)
		testcheck.NoError(t, err)
		files = append(files, file)
	}
	return files
}
