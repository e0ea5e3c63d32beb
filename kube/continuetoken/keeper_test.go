package continuetoken

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/storage/value"
)

func TestKeeper_ReplicasStartTogether_ShareOneRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		var replicas []*Keeper
		for range 20 {
			replicas = append(replicas, c.start(t, true))
		}
		for _, k := range replicas {
			token := mustSeal(t, k)
			for _, other := range replicas {
				requireOpens(t, other, token, nil)
			}
		}
		if _, puts := c.etcd.counts(); puts != 1 {
			t.Errorf("the ring was written %d times", puts)
		}
	})
}

// TestKeeper_StoredRing_IsEncrypted: its value is bound to its key and contains no secret.
func TestKeeper_StoredRing_IsEncrypted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		mustSeal(t, c.start(t, true))
		if stored := string(c.etcd.data); !strings.HasPrefix(stored, "0:/registry/strata/keys:") || strings.Contains(stored, "secret") {
			t.Errorf("stored as %.60q", stored)
		}
	})
}

// TestKeeper_CachedRing_DoesNotReadEtcd: with a cached ring, no request reads etcd, not even with
// tokens that are recognized as invalid without a key.
func TestKeeper_CachedRing_DoesNotReadEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		k := c.start(t, true)
		token := mustSeal(t, k)
		before, _ := c.etcd.counts()
		for range 100 {
			requireOpens(t, k, mustSeal(t, k), nil)
			requireOpens(t, k, token[:len(token)-1]+string(token[len(token)-1]^1), ErrInvalid)
			requireOpens(t, k, "s1.garbage", ErrInvalid)
		}
		if after, _ := c.etcd.counts(); after != before {
			t.Errorf("%d reads", after-before)
		}
	})
}

// TestKeeper_Rotation_ExpiresTokensOfDroppedKeys: a key seals for the rotation period, opens for
// the keep period, and its tokens are then refused as expired.
func TestKeeper_Rotation_ExpiresTokensOfDroppedKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		a, b := c.start(t, true), c.start(t, true)
		first := mustSeal(t, a)
		time.Sleep(testRotation - time.Second)
		if idOf(mustSeal(t, b)) != idOf(first) {
			t.Fatal("another key before it is time")
		}
		time.Sleep(time.Second + 2*refreshInterval)
		second := mustSeal(t, a)
		if idOf(second) == idOf(first) || idOf(mustSeal(t, b)) != idOf(second) {
			t.Fatal("no new key, or not the same one")
		}
		requireOpens(t, b, first, nil)
		time.Sleep(testKeep - 3*refreshInterval)
		requireOpens(t, b, first, nil)
		time.Sleep(4 * refreshInterval)
		requireOpens(t, a, first, ErrExpired)
		requireOpens(t, b, first, ErrExpired)
		requireOpens(t, b, second, nil)
		// A new replica has the same keys.
		requireOpens(t, c.start(t, true), first, ErrExpired)
		requireOpens(t, c.start(t, false), first, ErrExpired)
		requireOpens(t, c.start(t, false), second, nil)
		c.stop()
		time.Sleep(rememberDropped)
		requireOpens(t, c.start(t, true), first, ErrInvalid)
	})
}

// TestKeeper_TokenOfNewKey_OpensAtOnce on replicas that have not read the key yet.
func TestKeeper_TokenOfNewKey_OpensAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		a := c.start(t, true)
		old := mustSeal(t, a)
		b, reader := c.start(t, true), c.start(t, false)
		requireOpens(t, b, old, nil)
		requireOpens(t, reader, old, nil)

		h := a.current.Load()
		rotated, err := a.write(t.Context(), h.ring.maintained(time.Now(), time.Nanosecond, testKeep), h.mod)
		if err != nil || rotated == nil {
			t.Fatal(rotated, err)
		}
		token := rotated.ring.keys[0].seal(widgets, page)
		for _, k := range []*Keeper{a, b, reader} {
			var all sync.WaitGroup
			before, _ := c.etcd.counts()
			for range 100 {
				all.Go(func() { requireOpens(t, k, token, nil) })
			}
			all.Wait()
			if after, _ := c.etcd.counts(); after-before > 2 {
				t.Errorf("%d reads for 100 requests", after-before)
			}
			requireOpens(t, k, old, nil)
		}
		if got := mustSeal(t, b); idOf(got) != idOf(token) {
			t.Error("a replica that has read the new key still seals with the old one")
		}
	})
}

// TestKeeper_InventedKeyIDs_CauseBoundedReads: tokens with invented ids cause a bounded rate of
// reads, and each is refused.
func TestKeeper_InventedKeyIDs_CauseBoundedReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		k := c.start(t, true)
		mustSeal(t, k)
		before, _ := c.etcd.counts()
		began := time.Now()
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				for range 20 {
					requireOpens(t, k, newKey(time.Now()).seal(widgets, page), ErrInvalid)
				}
			})
		}
		all.Wait()
		took := time.Since(began)
		after, _ := c.etcd.counts()
		if most := int(took/readGap) + 2; after-before > most {
			t.Errorf("%d reads in %v, want at most %d", after-before, took, most)
		}
		if took > 20*3*readGap {
			t.Errorf("20 requests one after another took %v", took)
		}
	})
}

// TestKeeper_WithoutSealing_CreatesNoRing, and a ring made by other replicas is found.
func TestKeeper_WithoutSealing_CreatesNoRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		reader := c.start(t, false)
		time.Sleep(time.Hour)
		if gets, puts := c.etcd.counts(); gets+puts != 0 {
			t.Errorf("%d reads, %d writes without a request", gets, puts)
		}
		requireOpens(t, reader, newKey(time.Now()).seal(widgets, page), ErrInvalid)
		if _, err := reader.Seal(t.Context(), widgets, page); !errors.Is(err, ErrUnavailable) {
			t.Errorf("seal: %v", err)
		}
		if _, puts := c.etcd.counts(); puts != 0 {
			t.Errorf("%d writes", puts)
		}
		k := c.start(t, true)
		token := mustSeal(t, k)
		requireOpens(t, reader, token, nil)
		// A much later request finds that the key is gone.
		c.etcd.remove()
		time.Sleep(3 * refreshInterval)
		requireOpens(t, reader, token, ErrExpired)
	})
}

// TestKeeper_ReadOnly_SealsWithRingOfOthers: it makes no ring and rotates none, and seals once
// another replica has made one.
func TestKeeper_ReadOnly_SealsWithRingOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		reader := c.startAs(t, true, true)
		time.Sleep(time.Hour)
		if _, err := reader.Seal(t.Context(), widgets, page); !errors.Is(err, ErrUnavailable) {
			t.Errorf("seal without a ring: %v, want %v", err, ErrUnavailable)
		}
		if _, puts := c.etcd.counts(); puts != 0 {
			t.Errorf("%d writes", puts)
		}
		writer := c.start(t, true)
		requireOpens(t, reader, mustSeal(t, writer), nil)
		requireOpens(t, writer, mustSeal(t, reader), nil)
		writer.Close()
		_, before := c.etcd.counts()
		time.Sleep(2 * testRotation)
		requireOpens(t, reader, mustSeal(t, reader), nil)
		if _, puts := c.etcd.counts(); puts != before {
			t.Errorf("%d writes of a rotation", puts-before)
		}
	})
}

// TestKeeper_Outage_RefusesOnlyWithoutCachedRing: without a ring, requests are refused after a
// short wait, and not one wait each; with a cached ring requests succeed.
func TestKeeper_Outage_RefusesOnlyWithoutCachedRing(t *testing.T) {
	for name, outage := range map[string]struct {
		begin, end func(*cluster)
		most       time.Duration // of a first request
	}{
		"etcd fails": {
			func(c *cluster) { c.etcd.set(func(e *fakeEtcd) { e.err = errDown }) },
			func(c *cluster) { c.etcd.set(func(e *fakeEtcd) { e.err = nil }) }, readGap},
		"etcd hangs": {
			func(c *cluster) { c.etcd.set(func(e *fakeEtcd) { e.hang = true }) },
			func(c *cluster) { c.etcd.set(func(e *fakeEtcd) { e.hang = false }) }, patience},
		"the KMS fails": {
			func(c *cluster) { c.kms.set(func(f *fakeKMS) { f.err = errDown }) },
			func(c *cluster) { c.kms.set(func(f *fakeKMS) { f.err = nil }) }, readGap},
		"the KMS hangs": {
			func(c *cluster) { c.kms.set(func(f *fakeKMS) { f.hang = true }) },
			func(c *cluster) { c.kms.set(func(f *fakeKMS) { f.hang = false }) }, patience},
	} {
		for _, exists := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/ring exists=%v", name, exists), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var c cluster
					token := newKey(time.Now()).seal(widgets, page)
					var holder *Keeper
					if exists {
						holder = c.start(t, true)
						token = mustSeal(t, holder)
					}
					outage.begin(&c)
					k, reader := c.start(t, true), c.start(t, false)
					began := time.Now()
					if got, err := k.Seal(t.Context(), widgets, page); !errors.Is(err, ErrUnavailable) || got != "" {
						t.Fatalf("sealed %q, %v", got, err)
					}
					if waited := time.Since(began); waited > outage.most {
						t.Errorf("refused after %v, want %v", waited, outage.most)
					}
					requireOpens(t, k, token, ErrUnavailable)
					if exists || !strings.Contains(name, "KMS") {
						requireOpens(t, reader, token, ErrUnavailable)
					}
					if exists { // a cached ring needs no request to the KMS or etcd
						requireOpens(t, holder, mustSeal(t, holder), nil)
					}
					time.Sleep(time.Hour)
					began = time.Now()
					for range 100 {
						requireOpens(t, k, token, ErrUnavailable)
					}
					if waited := time.Since(began); outage.most == patience && waited > patience {
						t.Errorf("100 requests waited for %v", waited)
					}
					if exists {
						requireOpens(t, holder, mustSeal(t, holder), nil)
					}
					outage.end(&c)
					time.Sleep(2 * readTimeout)
					fresh := mustSeal(t, k)
					requireOpens(t, reader, fresh, nil)
					if exists {
						requireOpens(t, k, token, nil)
						requireOpens(t, holder, fresh, nil)
					}
				})
			})
		}
	}
}

// TestKeeper_ContextDone_EndsWait, minus the time for the answer.
func TestKeeper_ContextDone_EndsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		c.etcd.hang = true
		k := c.start(t, true)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		if _, err := k.Seal(ctx, widgets, page); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := k.Seal(ctx, widgets, page); !errors.Is(err, ErrUnavailable) || ctx.Err() != nil {
			t.Errorf("1 s: %v, %v", err, ctx.Err())
		}
	})
}

// TestKeeper_StaleEncryption_IsRewritten: the encryption of the ring follows the configuration,
// whether the old key can still decrypt or was removed at once; the keys in the ring stay.
func TestKeeper_StaleEncryption_IsRewritten(t *testing.T) {
	for name, reads := range map[string]map[int]bool{"the old key still reads": {0: true}, "the old key is removed": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var c cluster
				k := c.start(t, true)
				token := mustSeal(t, k)
				c.kms.set(func(f *fakeKMS) { f.writes, f.reads = 1, reads })
				time.Sleep(2 * refreshInterval)
				synctest.Wait()
				if !strings.HasPrefix(string(c.etcd.data), "1:") {
					t.Fatalf("stored as %.20q", c.etcd.data)
				}
				c.kms.set(func(f *fakeKMS) { f.reads = nil })
				requireOpens(t, c.start(t, true), token, nil)
				requireOpens(t, k, token, nil)
			})
		})
	}
	t.Run("at the start", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var c cluster
			token := mustSeal(t, c.start(t, true))
			c.kms.set(func(f *fakeKMS) { f.writes, f.reads = 1, map[int]bool{0: true} })
			c.start(t, false)
			synctest.Wait()
			if !strings.HasPrefix(string(c.etcd.data), "0:") {
				t.Fatal("a reader has written")
			}
			k := c.start(t, true)
			synctest.Wait()
			if !strings.HasPrefix(string(c.etcd.data), "1:") {
				t.Fatalf("stored as %.20q", c.etcd.data)
			}
			requireOpens(t, k, token, nil)
		})
	})
}

// TestKeeper_UnreadableRing_IsNotOverwritten: a ring written with another configuration, or by a
// later release, is not overwritten.
func TestKeeper_UnreadableRing_IsNotOverwritten(t *testing.T) {
	for name, spoil := range map[string]func(*cluster){
		"encrypted with another key": func(c *cluster) { c.kms.set(func(f *fakeKMS) { f.writes = 5 }) },
		"of a later release": func(c *cluster) {
			data, _ := c.kms.TransformToStorage(context.Background(), []byte(`{"version":2}`), value.DefaultContext("/registry/strata/keys"))
			_, _, _ = c.etcd.put(context.Background(), data, c.etcd.mod)
		},
		"garbage": func(c *cluster) { _, _, _ = c.etcd.put(context.Background(), []byte("garbage"), c.etcd.mod) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var c cluster
				first := c.start(t, true)
				token := mustSeal(t, first)
				first.Close()
				spoil(&c)
				kept, _ := c.etcd.counts()
				stored := string(c.etcd.data)
				k := c.start(t, true)
				if _, err := k.Seal(t.Context(), widgets, page); !errors.Is(err, ErrUnavailable) {
					t.Fatalf("seal: %v", err)
				}
				requireOpens(t, k, token, ErrUnavailable)
				time.Sleep(testRotation)
				if gets, _ := c.etcd.counts(); string(c.etcd.data) != stored || gets == kept {
					t.Fatalf("overwritten, or not tried: %d reads", gets-kept)
				}
				// The remedy that the log message names.
				c.etcd.remove()
				requireOpens(t, k, mustSeal(t, k), nil)
				requireOpens(t, k, token, ErrInvalid)
			})
		})
	}
}

// TestKeeper_RemovedRing_IsReplaced: a new ring replaces a removed one, and replicas that have read
// the old ring refuse its tokens as expired.
func TestKeeper_RemovedRing_IsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		a, b := c.start(t, true), c.start(t, true)
		token := mustSeal(t, a)
		requireOpens(t, b, token, nil)
		c.etcd.remove()
		time.Sleep(2 * refreshInterval)
		fresh := mustSeal(t, a)
		for _, k := range []*Keeper{a, b, c.start(t, true), c.start(t, false)} {
			requireOpens(t, k, token, ErrExpired)
			requireOpens(t, k, fresh, nil)
		}
	})
}

// TestKeeper_WriteConflict_UsesRingOfOtherReplica: a write by another replica between a read and a
// write wins, and its ring is used.
func TestKeeper_WriteConflict_UsesRingOfOtherReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		a := c.start(t, true)
		token := mustSeal(t, a)
		a.Close()
		c.etcd.remove()
		other := newRing(time.Now(), nil)
		c.etcd.set(func(e *fakeEtcd) {
			e.between = func() {
				data, _ := other.encode()
				data, _ = c.kms.TransformToStorage(context.Background(), data, value.DefaultContext("/registry/strata/keys"))
				_, _, _ = c.etcd.put(context.Background(), data, 0)
			}
		})
		b := c.start(t, true)
		requireOpens(t, b, other.keys[0].seal(widgets, page), nil)
		if got := mustSeal(t, b); idOf(got) != idOf(other.keys[0].seal(widgets, page)) {
			t.Error("sealed with a key that is not the one in etcd")
		}
		requireOpens(t, b, token, ErrInvalid)
	})
}

// TestKeeper_RotationFails_IsRetriedLater: a rotation that cannot be written is retried later.
func TestKeeper_RotationFails_IsRetriedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		k := c.start(t, true)
		token := mustSeal(t, k)
		time.Sleep(testRotation - time.Minute)
		c.kms.set(func(f *fakeKMS) { f.err = errDown })
		before, _ := c.etcd.counts()
		time.Sleep(time.Hour)
		if gets, _ := c.etcd.counts(); gets-before > 70 {
			t.Errorf("%d reads in an hour", gets-before)
		}
		if got := mustSeal(t, k); idOf(got) != idOf(token) {
			t.Fatal("rotated without being written")
		}
		requireOpens(t, k, newKey(time.Now()).seal(widgets, page), ErrInvalid)
		c.kms.set(func(f *fakeKMS) { f.err = nil })
		time.Sleep(2 * refreshInterval)
		if got := mustSeal(t, k); idOf(got) == idOf(token) {
			t.Fatal("not rotated")
		}
		requireOpens(t, k, token, nil)
	})
}

func TestKeeper_Close_EndsHangingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		c.kms.hang = true
		k := c.start(t, true)
		synctest.Wait()
		began := time.Now()
		k.Close()
		k.Close()
		if waited := time.Since(began); waited != 0 {
			t.Errorf("closed after %v", waited)
		}
		if _, err := k.Seal(t.Context(), widgets, page); !errors.Is(err, ErrUnavailable) {
			t.Errorf("seal after the end: %v", err)
		}
	})
}

// TestKeeper_ConcurrentReplicas_OpenEachOthersTokens seals and opens on several replicas while keys
// are replaced and the ring is removed; run it with the race detector.
func TestKeeper_ConcurrentReplicas_OpenEachOthersTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cluster
		c.etcd.delay = time.Millisecond
		var replicas []*Keeper
		for range 4 {
			replicas = append(replicas, c.start(t, true))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*testRotation+time.Hour)
		defer cancel()
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					token, err := replicas[(i+n)%4].Seal(t.Context(), widgets, page)
					if err != nil {
						t.Errorf("seal: %v", err)
						return
					}
					time.Sleep(time.Duration(n%7) * time.Minute)
					got, err := replicas[(i*3+n*5)%4].Open(t.Context(), widgets, token)
					if err != nil || got != page {
						t.Errorf("%+v, %v", got, err)
						return
					}
					time.Sleep(time.Duration(i+1) * time.Second)
				}
			})
		}
		all.Wait()
		if _, puts := c.etcd.counts(); puts < 3 || puts > 8 {
			t.Errorf("%d writes, want one for the ring, and two for each rotation", puts)
		}
	})
}
