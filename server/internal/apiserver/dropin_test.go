package apiserver

import (
	"testing"
)

// A server without a watch cache reads everything from etcd, with either engine.
func TestServer_WatchCacheDisabled_ServesResources(t *testing.T) {
	t.Parallel()
	s := startServer(t, startEtcd(t), "--watch-cache=false")
	t.Run("serves built-in resources", func(t *testing.T) { checkConfigMaps(t, s) })
	t.Run("serves custom resources", func(t *testing.T) { checkCustomResources(t, s) })
	t.Run("touches no upstream cacher", func(t *testing.T) { checkCacher(t, s, engineStrata) })
}
