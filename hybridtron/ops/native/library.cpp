// Which build this is: asked when a file is opened.
extern "C" const char *digest() { return DIGEST; }
