package history

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// fieldChange is one field in which two states of an object differ. A value is nil if the state
// does not have the field.
type fieldChange struct {
	Field  string `json:"field"`
	Before any    `json:"before,omitempty"`
	After  any    `json:"after,omitempty"`
}

// ignoredFields change with every write and say nothing about its contents. The manager of a
// version is printed separately.
var ignoredFields = map[string]bool{"metadata.managedFields": true, "metadata.resourceVersion": true}

// listKeys are the fields that identify the elements of lists of objects, in the order of
// preference.
var listKeys = []string{"name", "type", "key", "uid", "ip", "port", "containerPort"}

// compare returns the fields in which two objects in JSON form differ, ordered by field. A field
// that one of them lacks is one change, with all that is below it. Elements of a list are matched
// by the first of listKeys that all have, otherwise by their index if the lists are equally long;
// lists that cannot be matched are one change.
func compare(before, after map[string]any) []fieldChange {
	return compareMaps("", before, after)
}

func compareMaps(path string, before, after map[string]any) (changes []fieldChange) {
	keys := slices.Collect(maps.Keys(before))
	for key := range after {
		if _, ok := before[key]; !ok {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		changes = append(changes, compareValues(below(path, key), before[key], after[key])...)
	}
	return changes
}

func compareValues(path string, before, after any) []fieldChange {
	if ignoredFields[path] || reflect.DeepEqual(before, after) {
		return nil
	}
	switch b := before.(type) {
	case map[string]any:
		if a, ok := after.(map[string]any); ok {
			return compareMaps(path, b, a)
		}
	case []any:
		if a, ok := after.([]any); ok {
			return compareLists(path, b, a)
		}
	}
	return []fieldChange{{path, before, after}}
}

func compareLists(path string, before, after []any) (changes []fieldChange) {
	for _, key := range listKeys {
		b, bKeys := keyed(before, key)
		a, aKeys := keyed(after, key)
		if b == nil || a == nil {
			continue
		}
		for _, k := range bKeys {
			changes = append(changes, compareValues(fmt.Sprintf("%s[%s=%s]", path, key, k), b[k], a[k])...)
		}
		for _, k := range aKeys {
			if _, ok := b[k]; !ok {
				changes = append(changes, fieldChange{Field: fmt.Sprintf("%s[%s=%s]", path, key, k), After: a[k]})
			}
		}
		if len(changes) > 0 {
			return changes
		}
		break // the same elements in another order
	}
	if len(before) != len(after) {
		return []fieldChange{{path, before, after}}
	}
	for i := range before {
		changes = append(changes, compareValues(fmt.Sprintf("%s[%d]", path, i), before[i], after[i])...)
	}
	return changes
}

// keyed returns the elements of a list by the values of a key, and these in order; nil unless all
// elements have different ones.
func keyed(list []any, key string) (map[string]any, []string) {
	elements, order := make(map[string]any, len(list)), make([]string, 0, len(list))
	for _, element := range list {
		object, _ := element.(map[string]any)
		value, ok := object[key]
		text := fmt.Sprint(value)
		if _, double := elements[text]; !ok || double {
			return nil, nil
		}
		elements[text] = element
		order = append(order, text)
	}
	return elements, order
}

// below appends a key to a path. A key with dots is put into brackets.
func below(path, key string) string {
	switch {
	case strings.ContainsAny(key, ".[]"):
		return path + "[" + key + "]"
	case path == "":
		return key
	}
	return path + "." + key
}

// within reports whether the path inner is outer or below it.
func within(outer, inner string) bool {
	rest, ok := strings.CutPrefix(inner, outer)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// value returns a field's value for a table, as JSON.
func value(v any) string {
	if v == nil {
		return "<none>"
	}
	data, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(data)
}
