package opspage

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// addressAttributes are the attributes whose value a browser, or the script of the page, requests.
var addressAttributes = []string{"href", "src", "action", "formaction", "hx-get"}

// findAddresses returns the addresses in a document that lead to its own host.
func findAddresses(t *testing.T, body string) (list []string) {
	t.Helper()
	document, err := html.Parse(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}

	for node := range document.Descendants() {
		for _, attribute := range node.Attr {
			isLocal := attribute.Val != "" && !strings.HasPrefix(attribute.Val, "https://") && !strings.HasPrefix(attribute.Val, "#")
			if slices.Contains(addressAttributes, attribute.Key) && isLocal {
				list = append(list, attribute.Val)
			}
		}
	}
	return list
}

// Every address of every page begins with the prefix, exactly once.
func TestAddressesBeginWithThePrefix(t *testing.T) {
	t.Parallel()
	desk := &desk{text: "orders", count: 2}
	site := New(Options{Prefix: "/ops/outrelay", Watcher: "orders", Node: "n1", Version: "v1", UseCases: func(admin.Actor, string, string) UseCases {
		return desk.useCases()
	}})
	seen := 0
	checkAddresses := func(page, body string) {
		for _, address := range findAddresses(t, body) {
			seen++
			if !strings.HasPrefix(address, "/ops/outrelay/") || strings.Count(address, "/ops/outrelay") != 1 {
				t.Errorf("%s: address %s is not below the prefix", page, address)
			}
		}
	}

	for _, page := range allAddresses() {
		_, body := sendRequest(t, site, &operator, "GET", page, nil)
		checkAddresses(page, body)
		if strings.Contains(body, "<html") && !strings.Contains(body, `data-base="/ops/outrelay"`) {
			t.Errorf("%s: the script cannot find the prefix", page)
		}
	}
	form := url.Values{"pick": {"a"}}
	_, body := sendRequest(t, site, &operator, "POST", "/confirm/dead-requeue", form)
	checkAddresses("the question of an action", body)

	// The redirect after an action leads back to its list.
	form.Set("_count", "2")
	response, _ := sendRequest(t, site, &operator, "POST", "/act/dead-requeue", form)
	if at := response.Header.Get("Location"); !strings.HasPrefix(at, "/ops/outrelay/dead?done=") {
		t.Errorf("redirect after an action: got %q, want /ops/outrelay/dead?done=…", at)
	}

	recorder := httptest.NewRecorder()
	LoginForm("/ops/outrelay")(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/login", nil), http.StatusOK, "", "/dead")
	checkAddresses("the login", recorder.Body.String())
	if seen < 300 {
		t.Errorf("only %d addresses were found", seen)
	}
}
