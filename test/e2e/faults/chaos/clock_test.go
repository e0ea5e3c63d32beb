package chaos

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// wallClock are the functions and methods that read or use the time of day. The rest of package
// time (Now, Since, Sub, Add, Before, timers) uses the monotonic clock, which cannot be set.
var wallClock = map[string]bool{
	"Unix": true, "UnixNano": true, "UnixMicro": true, "UnixMilli": true, "Date": true, "YearDay": true, "Weekday": true, "UTC": true,
	"Format": true, "AppendFormat": true, "Parse": true, "ParseInLocation": true,
}

// allowed are the places where the time of day has no effect on answers.
var allowed = map[string]string{
	"kube/internal/watch/bookmark.go UnixNano":     "bookmarks of many watches are due at the same moments; which ones is all that follows from it",
	"kube/internal/slowclient/cutoff.go time.Unix": "a moment that has passed, for a deadline",
}

// TestSourceCode_DoesNotReadTimeOfDay reads the source code between etcd and the clients.
// TestFaults_ConcurrentClients_HistoriesAreValid covers the behaviour: a server whose clock is days
// ahead, and is set forward and back, answers like the others.
//
// Sealed continue tokens are the exception, and their package is not checked: their keys carry
// their creation time, for all replicas. With a wrong clock the keys are rotated too early or too
// late; a token that can no longer be opened is answered with 410.
func TestSourceCode_DoesNotReadTimeOfDay(t *testing.T) {
	root := filepath.Join("..", "..", "..", "..")
	files, met := 0, map[string]bool{}
	for _, dir := range []string{"mirror", "etcdsource", "etcdfeed", "btree", "kube/kubestorage", "kube/internal", "kube/consistency", "kube/listadmission", "kube/readpath"} {
		harness.Check(t, fs.WalkDir(os.DirFS(root), dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files++
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, filepath.Join(root, path), nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				f, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !wallClock[f.Sel.Name] {
					return true
				}
				name := f.Sel.Name
				if p, ok := f.X.(*ast.Ident); ok && p.Obj == nil { // a package
					if p.Name != "time" {
						return true
					}
					name = "time." + name
				}
				place := path + " " + name
				if _, ok := allowed[place]; ok {
					met[place] = true
					return true
				}
				t.Errorf("%v: %s goes by the time of day", set.Position(call.Pos()), name)
				return true
			})
			return nil
		}))
	}
	if files < 20 {
		t.Errorf("only %d files were read", files)
	}
	for place := range allowed {
		if !met[place] {
			t.Errorf("%s is allowed, and is not there", place)
		}
	}
}
