package opspage

import (
	"html/template"
	"net/http"
	"net/url"
)

// LoginForm returns a function that shows the form of the login: see httpapi.AdminOptions.
func LoginForm() func(w http.ResponseWriter, r *http.Request, status int, problem, next string) {
	form := loadTemplates(loadAssets())["login"]
	return func(w http.ResponseWriter, r *http.Request, status int, problem, next string) {
		action := "/login"
		if next != "/" {
			action += "?next=" + url.QueryEscape(next)
		}
		withHeaders(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			renderLogin(w, form, status, problem, action)
		})).ServeHTTP(w, r)
	}
}

func renderLogin(w http.ResponseWriter, form *template.Template, status int, problem, action string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	// An error means that the client has disconnected.
	_ = form.ExecuteTemplate(w, "login", struct{ Problem, Action string }{problem, action})
}
