package readpath

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apisharding "k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/sharding"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// listOptions decodes and validates the query as upstream's handlers do.
func (r *readRequest) listOptions() (metainternalversion.ListOptions, error) {
	opts := metainternalversion.ListOptions{}
	if err := metainternalversionscheme.ParameterCodec.DecodeParameters(r.req.URL.Query(), metav1.SchemeGroupVersion, &opts); err != nil {
		return opts, apierrors.NewBadRequest(err.Error())
	}
	watchList := utilfeature.DefaultFeatureGate.Enabled(features.WatchList)
	metainternalversion.SetListOptionsDefaults(&opts, watchList)
	if errs := metainternalversionvalidation.ValidateListOptions(&opts, watchList); len(errs) > 0 {
		return opts, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	if opts.FieldSelector != nil {
		selector, err := opts.FieldSelector.Transform(r.resource.FieldLabel)
		if err != nil {
			return opts, apierrors.NewBadRequest(err.Error())
		}
		opts.FieldSelector = selector
	}
	if name := r.info.Name; name != "" {
		// The name was authorized; the selector must not select another one.
		if opts.FieldSelector == nil || opts.FieldSelector.Empty() {
			opts.FieldSelector = fields.OneTermEqualSelector("metadata.name", name)
		} else if selected, ok := opts.FieldSelector.RequiresExactMatch("metadata.name"); !ok || selected != name {
			return opts, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
		}
	}
	return opts, nil
}

// parseShardSelector returns the shard selector of the request, or nil if there is none or the
// feature gate is off.
func parseShardSelector(opts metainternalversion.ListOptions) (apisharding.Selector, error) {
	if opts.ShardSelector == "" || !utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		return nil, nil
	}
	selector, err := sharding.Parse(opts.ShardSelector)
	if err != nil {
		return nil, fmt.Errorf("invalid shard selector: %w", err)
	}
	return selector, nil
}

// storageOptions returns the key and options that a registry would pass to its storage. The error
// is that of parsing a shard selector.
func (r *readRequest) storageOptions(opts metainternalversion.ListOptions) (key string, o storage.ListOptions, err error) {
	pred := storage.SelectionPredicate{
		Label:               labels.Everything(),
		Field:               fields.Everything(),
		Limit:               opts.Limit,
		Continue:            opts.Continue,
		IndexFields:         r.resource.IndexFields,
		IndexLabels:         r.resource.IndexLabels,
		AllowWatchBookmarks: opts.AllowWatchBookmarks,
	}
	if pred.ShardSelector, err = parseShardSelector(opts); err != nil {
		return "", o, err
	}
	if opts.LabelSelector != nil {
		pred.Label = opts.LabelSelector
	}
	if opts.FieldSelector != nil {
		pred.Field = opts.FieldSelector
	}
	o = storage.ListOptions{
		ResourceVersion:      opts.ResourceVersion,
		ResourceVersionMatch: opts.ResourceVersionMatch,
		Predicate:            pred,
		Recursive:            true,
		SendInitialEvents:    opts.SendInitialEvents,
	}
	ns := r.info.Namespace
	if ns == "" {
		// A selector for one namespace narrows the key range, but continue tokens stay relative to
		// the resource.
		if selected, ok := pred.MatchesSingleNamespace(); ok && len(validation.ValidateNamespaceName(selected, false)) == 0 {
			ns = selected
		}
	}
	if name, ok := pred.MatchesSingle(); ok {
		if key, err := r.key(ns, name); err == nil {
			o.Recursive = false
			return key, o, nil
		}
	}
	return r.rootKey(ns), o, nil
}
