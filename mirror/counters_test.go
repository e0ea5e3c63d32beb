package mirror

import (
	"reflect"
	"sync/atomic"
	"testing"
)

// TestCounters_AreCopiedToStats: each exported counter has a field of Stats, which gets its value.
func TestCounters_AreCopiedToStats(t *testing.T) {
	var c counters
	fields := reflect.ValueOf(&c).Elem()
	for i := range fields.NumField() {
		if !fields.Type().Field(i).IsExported() {
			continue
		}
		switch n := fields.Field(i).Addr().Interface().(type) {
		case *atomic.Int64:
			n.Store(int64(100 + i))
		case *atomic.Bool:
			n.Store(true)
		default:
			t.Errorf("%s has no kind that is copied", fields.Type().Field(i).Name)
		}
	}
	var s Stats
	c.copyTo(&s)
	stats := reflect.ValueOf(s)
	for i := range fields.NumField() {
		field := fields.Type().Field(i)
		if !field.IsExported() {
			continue
		}
		switch got := stats.FieldByName(field.Name); {
		case !got.IsValid():
			t.Errorf("Stats has no field %s", field.Name)
		case got.Kind() == reflect.Bool && !got.Bool(), got.Kind() != reflect.Bool && got.Int() != int64(100+i):
			t.Errorf("%s is %v", field.Name, got)
		}
	}
}
