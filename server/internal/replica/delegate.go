package replica

import (
	"context"
	"fmt"
	"net/http"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	apiserverapi "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/path"
	"k8s.io/apiserver/pkg/authorization/union"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/informers"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

const (
	// reviewAge is the time for which the answer of a review is used again: the default of
	// aggregated API servers.
	reviewAge = 10 * time.Second
	// reviewTimeout bounds one review.
	reviewTimeout = 10 * time.Second
	// verifyPause is the time between two attempts to find out whether the primaries permit
	// reviews; a guess.
	verifyPause = 5 * time.Second
)

// reviewBackoff are the repetitions of a review that failed without an answer. They end within half
// a second, so that a request is not held up while no primary is reachable.
var reviewBackoff = wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Steps: 3}

// reviews are the clients of --delegate-auth.
type reviews struct {
	authentication authenticationclient.AuthenticationV1Interface
	authorization  authorizationclient.AuthorizationV1Interface
	anonymous      bool // --anonymous-auth
	cas            []dynamiccertificates.CAContentProvider
}

func newReviews(to http.RoundTripper) (*reviews, error) {
	config := &rest.Config{Host: "https://primary", QPS: -1}
	client := &http.Client{Transport: ownRequests{to}, Timeout: reviewTimeout}
	tokens, err := authenticationclient.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	access, err := authorizationclient.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	return &reviews{authentication: tokens, authorization: access}, nil
}

// withoutKeys makes options complete and valid without the keys and the issuer of service accounts:
// tokens are reviewed by the primaries.
func withoutKeys(o *options.ServerRunOptions) {
	accounts := o.Authentication.ServiceAccounts
	accounts.KeyFiles = nil
	accounts.Issuers = []string{"https://kubernetes.default.svc"} // not used
	accounts.ExternalPublicKeysGetter = noKeys{}
	accounts.OptionalTokenGetter = func(informers.SharedInformerFactory) serviceaccount.ServiceAccountTokenGetter { return noAccounts{} }
	o.Authentication.APIAudiences = nil
	o.Authorization.Modes = []string{"AlwaysDeny"} // replaced
}

// noKeys are the public keys of an issuer without keys.
type noKeys struct{}

func (noKeys) AddListener(serviceaccount.Listener)                              {}
func (noKeys) GetCacheAgeMaxSeconds() int                                       { return 0 }
func (noKeys) GetPublicKeys(context.Context, string) []serviceaccount.PublicKey { return nil }

// noAccounts takes the place of the objects to which tokens are bound, which the primaries look up.
// It is not called, because the authenticator that would do so is replaced.
type noAccounts struct {
	serviceaccount.ServiceAccountTokenGetter
}

// noTokens takes the place of the generator of tokens, which kube-apiserver requires. Requests for
// tokens are proxied.
type noTokens struct{ serviceaccount.TokenGenerator }

// install replaces the authenticator and the authorizer of the chain by reviews at the primaries.
// Client certificates and front proxies are verified here, with the authorities of the flags.
func (r *reviews) install(config *app.Config, o options.CompletedOptions) error {
	requestHeader, err := o.Authentication.RequestHeader.ToAuthenticationRequestHeaderConfig()
	if err != nil {
		return err
	}
	clientCA, err := o.Authentication.ClientCert.GetClientCAContentProvider()
	if err != nil {
		return err
	}
	authentication := authenticatorfactory.DelegatingAuthenticatorConfig{
		Anonymous:                &apiserverapi.AnonymousAuthConfig{Enabled: r.anonymous},
		TokenAccessReviewClient:  r.authentication,
		TokenAccessReviewTimeout: reviewTimeout,
		WebhookRetryBackoff:      &reviewBackoff,
		CacheTTL:                 reviewAge,
		RequestHeaderConfig:      requestHeader,
	}
	if requestHeader != nil {
		r.cas = append(r.cas, requestHeader.CAContentProvider)
	}
	if clientCA != nil {
		authentication.ClientCertificateCAContentProvider = clientCA
		r.cas = append(r.cas, clientCA)
	}
	users, _, err := authentication.New()
	if err != nil {
		return fmt.Errorf("authentication by the primaries: %w", err)
	}
	access, err := r.authorizer()
	if err != nil {
		return err
	}
	for _, c := range genericConfigs(config) {
		c.Authentication = genericapiserver.AuthenticationInfo{Authenticator: users, RequestHeaderConfig: requestHeader}
		c.Authorization = genericapiserver.AuthorizationInfo{Authorizer: access}
		c.RuleResolver = nil
	}
	return nil
}

// healthPaths are permitted to every user without a primary, as to all users of stock by the
// ClusterRole system:public-info-viewer. Single checks, such as /readyz/etcd, are not.
var healthPaths = []string{"/healthz", "/livez", "/readyz"}

// authorizer permits administrators everything, and every user healthPaths, without a primary.
func (r *reviews) authorizer() (authorizer.Authorizer, error) {
	paths, err := path.NewAuthorizer(healthPaths)
	if err != nil {
		return nil, err
	}
	delegated, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: r.authorization, AllowCacheTTL: reviewAge, DenyCacheTTL: reviewAge, WebhookRetryBackoff: &reviewBackoff,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("authorization by the primaries: %w", err)
	}
	return union.New(
		union.NamedAuthorizer{AuthorizerName: "administrators", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)},
		union.NamedAuthorizer{AuthorizerName: "health", Authorizer: paths},
		union.NamedAuthorizer{AuthorizerName: "primaries", Authorizer: delegated},
	)
}

// Run follows changes of the authorities, and logs an error if the primaries do not permit reviews,
// until ctx ends.
func (r *reviews) Run(ctx context.Context) {
	for _, ca := range r.cas {
		if runner, ok := ca.(dynamiccertificates.ControllerRunner); ok {
			go runner.Run(ctx, 1)
		}
	}
	_ = wait.PollUntilContextCancel(ctx, verifyPause, true, func(ctx context.Context) (bool, error) {
		_, err := r.authorization.SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: username, NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/healthz", Verb: "get"},
		}}, metav1.CreateOptions{})
		if apierrors.IsForbidden(err) {
			klog.ErrorS(err, "The primaries refuse the reviews of --delegate-auth, so that requests of users are refused; grant them with: "+
				"kubectl create clusterrolebinding strata-replica --clusterrole=system:auth-delegator --user="+username)
		}
		return err == nil, nil
	})
}
