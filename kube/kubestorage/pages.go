package kubestorage

import (
	"context"
	"errors"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// keys are those of one resource in etcd.
type keys struct {
	pathPrefix     string // of every key in etcd, with a slash at both ends
	resourcePrefix string // begins with a slash
}

// prepare turns a key of storage.Interface into one of etcd.
func (k keys) prepare(key string, recursive bool) (string, error) {
	key, err := storage.PrepareKey(k.resourcePrefix, key, recursive)
	if err != nil {
		return "", err
	}
	return k.pathPrefix + strings.TrimPrefix(key, "/"), nil
}

// scope returns what the tokens of a list of the keys below prefix are relative to: what the
// client has asked for. A field selector for one namespace narrows the first page to the keys of
// the namespace, but not the following ones.
func (k keys) scope(ctx context.Context, prefix string, opts storage.ListOptions) string {
	info, ok := request.RequestInfoFrom(ctx)
	if ok && info.Namespace == "" && opts.Recursive && opts.Predicate.Continue == "" {
		return k.pathPrefix + strings.Trim(k.resourcePrefix, "/") + "/"
	}
	return prefix
}

// pages is what lists of a resource do with limits and continue tokens, whoever answers them.
type pages struct {
	group    schema.GroupResource
	tokens   *tokens
	chunking bool // the gate APIListChunking
}

func (c *cluster) pages(resource schema.GroupResource) pages {
	return pages{group: resource, tokens: c.tokens, chunking: c.opts.enabled(APIListChunking)}
}

// open returns the options with the token in upstream's plain form. prefix is that of the
// request's keys. Errors are for the client.
func (p *pages) open(ctx context.Context, prefix string, opts storage.ListOptions) (storage.ListOptions, error) {
	if !p.chunking {
		opts.Predicate.Limit, opts.Predicate.Continue = 0, ""
	}
	if opts.Predicate.Continue == "" || !opts.Recursive {
		return opts, nil
	}
	var err error
	opts.Predicate.Continue, err = p.tokens.open(ctx, p.group, prefix, opts.Predicate.Continue)
	return opts, err
}

// seal gives a token of upstream's plain form the one that clients are sent. scope is the prefix
// of the keys that the client asked for, with or without the slash at its end.
func (p *pages) seal(ctx context.Context, scope, plain string) (string, error) {
	return p.tokens.seal(ctx, p.group, strings.TrimSuffix(scope, "/")+"/", plain)
}

// list has upstream's store answer, whose tokens are relative to prefix, and makes the token one
// for scope.
func (p *pages) list(ctx context.Context, etcd storage.Interface, key, prefix, scope string, opts storage.ListOptions, out runtime.Object) error {
	if err := etcd.GetList(ctx, key, opts, out); err != nil {
		return p.sealError(ctx, scope, err)
	}
	list, err := meta.ListAccessor(out)
	if err != nil || list.GetContinue() == "" {
		return err
	}
	token, err := rebase(list.GetContinue(), prefix, scope)
	if err == nil {
		token, err = p.seal(ctx, scope, token)
	}
	if err != nil {
		return err
	}
	list.SetContinue(token)
	return nil
}

// sealError seals the token of a 410.
func (p *pages) sealError(ctx context.Context, scope string, err error) error {
	var status *apierrors.StatusError
	if !errors.As(err, &status) || status.ErrStatus.Continue == "" {
		return err
	}
	token, sealErr := p.seal(ctx, scope, status.ErrStatus.Continue)
	if sealErr != nil {
		return sealErr
	}
	told := status.ErrStatus.DeepCopy()
	told.Continue = token
	return &apierrors.StatusError{ErrStatus: *told}
}
