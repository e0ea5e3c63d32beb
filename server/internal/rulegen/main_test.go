package main

import (
	"bytes"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// tree returns the source of Kubernetes.
func tree(t *testing.T) fs.FS {
	t.Helper()
	dir, err := kubernetes()
	testcheck.NoError(t, err)
	return os.DirFS(dir)
}

// The committed rules are those of the source that the module requires.
func TestGenerate_CommittedFile_IsCurrent(t *testing.T) {
	want, err := generate(tree(t))
	testcheck.NoError(t, err)
	if got, err := os.ReadFile("../../" + output); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is stale: run make generate (%v)", output, err)
	}
}

// edited is a tree in which one string of one file is another.
type edited struct {
	fs.FS
	t              *testing.T
	file, old, now string
}

func (e edited) ReadFile(name string) ([]byte, error) {
	data, err := fs.ReadFile(e.FS, name)
	if name != "pkg/apis/core/v1/"+e.file {
		return data, err
	}
	if !bytes.Contains(data, []byte(e.old)) {
		e.t.Errorf("%s has no %q", name, e.old)
	}
	return bytes.ReplaceAll(data, []byte(e.old), []byte(e.now)), err
}

// A change of upstream's source changes the rules, or is an error that names the function.
func TestGenerate_ChangedSource_IsFollowedOrRejected(t *testing.T) {
	const defaults, called, conversions, generated = "defaults.go", "zz_generated.defaults.go", "conversion.go", "zz_generated.conversion.go"
	dns := "\tif obj.DNSPolicy == \"\" {"
	for name, c := range map[string]struct {
		file, old, now string
		rule, err      string // that the result or the error has
	}{
		"another default":   {defaults, dns, "\tif obj.Hostname == \"\" {\nobj.Hostname = \"x\"\n}\n" + dns, `Set: []string{"hostname", "dnsPolicy"`, ""},
		"a bool":            {defaults, dns, "\tif obj.HostPID {\nobj.Hostname = \"x\"\n}\n" + dns, `Unset: []string{"hostPID"`, ""},
		"another gate":      {defaults, "features.H2CContainerProbe", "features.Other", `HTTPGetAction](), features.Other, `, ""},
		"a nested message":  {called, "SetDefaults_PodSpec(&in.Spec)", "if in.Spec.DNSConfig != nil {\nif in.Spec.DNSConfig.Options == nil {\nf()\n}\n}", `PodDNSConfig](), "", transcode.Rule{Set: []string{"options"}}`, ""},
		"an assignment":     {defaults, dns, "\tobj.Hostname = f(obj.Hostname)\n" + dns, "", "SetDefaults_PodSpec"},
		"a disjunction":     {defaults, `if obj.Path == "" {`, `if obj.Path == "" || obj.Host == "" {`, "", "SetDefaults_HTTPGetAction"},
		"an alternative":    {defaults, "\tif obj.APIVersion == \"\" {\n", "\tif obj.APIVersion == \"\" {\n} else {\n", "", "SetDefaults_ObjectFieldSelector"},
		"a pointer's value": {defaults, "if obj.SecurityContext == nil {", `if *obj.SetHostnameAsFQDN == 0 {`, "", "SetDefaults_PodSpec"},
		"a foreign call":    {called, "SetDefaults_PodStatus(&in.Status)", "other.Set(&in.Status)", "", "SetObjectDefaults_Pod"},
		"a known statement": {defaults, "val.RoundUp(milliScale)", "val.RoundUp(0)", "", "SetDefaults_ResourceList"},
		"a statement gone":  {called, "SetDefaults_PodStatus(&in.Status)", "", "", "SetDefaults_PodStatus"},
		"a conversion":      {conversions, "// StringData overwrites Data", "out.Type = core.SecretType(f(in.Type))", "", "Convert_v1_Secret_To_core_Secret"},
		"a lost field":      {generated, "// INFO: in.StringData opted", "// WARNING: in.Immutable requires manual conversion\n// INFO: in.StringData opted", "", "immutable"},
		"a renamed field":   {generated, "out.Unschedulable = in.Unschedulable", "out.Unschedulable = in.DoNotSchedule", "", "NodeSpec"},
	} {
		out, err := generate(edited{tree(t), t, c.file, c.old, c.now})
		switch {
		case c.err == "" && (err != nil || !strings.Contains(string(out), c.rule)):
			t.Errorf("%s: the result has no %q (%v)", name, c.rule, err)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%s: error %v, want one about %s", name, err, c.err)
		}
	}
}
