// Package pages implements keys, limits and continue tokens of lists, for any source of their
// objects.
package pages

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

// Keys converts the keys of one resource to keys in etcd.
type Keys struct {
	PathPrefix     string // of every key in etcd, with a slash at both ends
	ResourcePrefix string // begins with a slash
}

// Prepare converts a key of storage.Interface to one of etcd.
func (k Keys) Prepare(key string, recursive bool) (string, error) {
	key, err := storage.PrepareKey(k.ResourcePrefix, key, recursive)
	if err != nil {
		return "", err
	}
	return k.PathPrefix + strings.TrimPrefix(key, "/"), nil
}

// Scope returns the prefix that the tokens of a list of the keys below prefix are relative to: that
// of the client's request. A field selector for one namespace narrows the first page to the keys of
// the namespace, but not the following ones.
func (k Keys) Scope(ctx context.Context, prefix string, opts storage.ListOptions) string {
	info, ok := request.RequestInfoFrom(ctx)
	if ok && info.Namespace == "" && opts.Recursive && opts.Predicate.Continue == "" {
		return k.PathPrefix + strings.Trim(k.ResourcePrefix, "/") + "/"
	}
	return prefix
}

// Pages implements limits and continue tokens for the lists of a resource, from memory and from
// etcd.
type Pages struct {
	group    schema.GroupResource
	tokens   *Tokens
	chunking bool // the gate APIListChunking
}

// New returns the pages of a resource. Without chunking limits and tokens are ignored.
func New(resource schema.GroupResource, tokens *Tokens, chunking bool) Pages {
	return Pages{group: resource, tokens: tokens, chunking: chunking}
}

// Open returns the options with the token in upstream's plain form. prefix is that of the
// request's keys. Errors are for the client.
func (p *Pages) Open(ctx context.Context, prefix string, opts storage.ListOptions) (storage.ListOptions, error) {
	if !p.chunking {
		opts.Predicate.Limit, opts.Predicate.Continue = 0, ""
	}
	if opts.Predicate.Continue == "" || !opts.Recursive {
		return opts, nil
	}
	var err error
	opts.Predicate.Continue, err = p.tokens.Open(ctx, p.group, prefix, opts.Predicate.Continue)
	return opts, err
}

// Seal converts a token of upstream's plain form to the client's form. scope is the key prefix of
// the client's request, with or without the slash at its end.
func (p *Pages) Seal(ctx context.Context, scope, plain string) (string, error) {
	return p.tokens.Seal(ctx, p.group, strings.TrimSuffix(scope, "/")+"/", plain)
}

// List lists through upstream's store, whose tokens are relative to prefix, and rebases and seals
// the token for scope.
func (p *Pages) List(ctx context.Context, etcd storage.Interface, key, prefix, scope string, opts storage.ListOptions, out runtime.Object) error {
	if err := etcd.GetList(ctx, key, opts, out); err != nil {
		return p.SealError(ctx, scope, err)
	}
	list, err := meta.ListAccessor(out)
	if err != nil || list.GetContinue() == "" {
		return err
	}
	token, err := rebase(list.GetContinue(), prefix, scope)
	if err == nil {
		token, err = p.Seal(ctx, scope, token)
	}
	if err != nil {
		return err
	}
	list.SetContinue(token)
	return nil
}

// SealError seals the token of a 410.
func (p *Pages) SealError(ctx context.Context, scope string, err error) error {
	var status *apierrors.StatusError
	if !errors.As(err, &status) || status.ErrStatus.Continue == "" {
		return err
	}
	token, sealErr := p.Seal(ctx, scope, status.ErrStatus.Continue)
	if sealErr != nil {
		return sealErr
	}
	sealed := status.ErrStatus.DeepCopy()
	sealed.Continue = token
	return &apierrors.StatusError{ErrStatus: *sealed}
}
