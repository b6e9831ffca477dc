"""The page: one HTML document with plain ES modules and styles, under a content policy that lets in nothing else."""

from api.web.page import CONTENT_SECURITY_POLICY, PAGE_HEADERS, is_page_path, mount_page

__all__ = ["CONTENT_SECURITY_POLICY", "PAGE_HEADERS", "is_page_path", "mount_page"]
