package handlerchain

import (
	"bufio"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// FuzzFastRead: a request that takes the fast chain does so with upstream's RequestInfo, and its
// verb is not part of its path.
func FuzzFastRead(f *testing.F) {
	infos := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	chain := &Chain{requestInfo: infos, fast: http.NotFoundHandler(), fastWatches: true}
	chain.complete.Store(true)
	for _, path := range []string{"/apis/example.com/v1/", "/api/v1/"} {
		for _, target := range []string{
			"pods", "namespaces/ns/pods", "namespaces/ns/pods/a", "pods?limit=2&resourceVersion=0", "pods?watch=1", "watch/pods", "proxy/pods", "watch",
			"pods/", "pods//", "namespaces//pods", "namespaces/ns/pods/a/status", "namespaces/ns/pods/%61", "namespaces/ns/pods/..%2Fa",
			"namespaces/ns/pods/../pods/a", "./pods", "namespaces/n%20s/pods", "pods?fieldSelector=metadata.name%3Db", "pods;a=b", "pods%3Fx", "watches",
		} {
			f.Add(path + target)
		}
	}
	f.Fuzz(func(t *testing.T, target string) {
		if strings.ContainsAny(target, " \r\n") {
			return
		}
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader("GET " + target + " HTTP/1.1\r\nHost: fuzz\r\n\r\n")))
		if err != nil {
			return
		}
		parsed, fast := chain.fastRead(req)
		if parsed == nil {
			return
		}
		info, err := infos.NewRequestInfo(req)
		if err != nil || !reflect.DeepEqual(parsed, info) {
			t.Errorf("%s is parsed as %+v; it is %+v, %v", req.URL, parsed, info, err)
		}
		if !fast {
			return
		}
		for _, verb := range []string{"watch", "proxy"} {
			prefix := "/" + info.APIPrefix + "/" + strings.TrimPrefix(info.APIGroup+"/", "/") + info.APIVersion + "/" + verb + "/"
			if strings.HasPrefix(info.Path, prefix) {
				t.Errorf("%s takes the fast chain", req.URL)
			}
		}
	})
}
